"""A draft model of another tokenizer, seen in the target's vocabulary."""
