"""The coordinator: rounds, text, and the public API."""
