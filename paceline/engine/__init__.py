"""Models: loading, KV sessions, one batched forward pass, table and timed models."""
