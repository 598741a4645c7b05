"""Models' names, files and tokenizers."""
