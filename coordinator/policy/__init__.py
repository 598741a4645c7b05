"""What is drafted: drafters, lengths and shapes, by measured costs."""
