"""Tiny engines with written-down distributions."""
