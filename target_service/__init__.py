"""The target service: batched verification by the large model."""
