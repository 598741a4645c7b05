"""Drafts that Paceline finds by their target's name: one folder each, as `paceline train pack` writes it."""
