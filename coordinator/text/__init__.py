"""Committed tokens, their text, and its way to the client."""
