"""Checkpoints of drafters as other projects write them: one module a format, each translated when it is loaded."""
