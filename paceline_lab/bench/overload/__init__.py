"""Ten times as much as there is room for: who is served keeps its speed, the others are told at once when to come."""
