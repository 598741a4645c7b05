"""Ten times the load that there is room for: who is served keeps its speed, and others hear at once when to retry."""
