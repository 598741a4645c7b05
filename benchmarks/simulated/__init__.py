"""Overlap and load on timed models: services in processes of their own whose steps wait as long as stated."""
