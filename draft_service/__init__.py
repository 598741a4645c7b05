"""The draft service: proposals by cheap drafters."""
