"""Drafts made of the target's own layers, as `paceline train` makes them: their folder, and the engine of it."""
