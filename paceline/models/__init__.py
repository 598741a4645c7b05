"""Where models come from, and their tokenizers."""
