"""Fixed shapes: logits are bit-identical whatever else is in the step."""
