"""The choice of drafters, lengths and shapes, by measured costs."""
