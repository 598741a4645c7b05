"""Overlap and load on simulated models: services in processes of their own whose steps wait as long as stated."""
