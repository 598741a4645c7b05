"""What matches bring on texts that are known: a replay without models, suffix automata beside n-gram look-ups."""
