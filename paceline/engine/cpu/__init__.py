"""Compiled steps of few rows on CPUs."""
