"""Tensor parallelism: one engine whose model, and whose vocabulary, is spread over ranks.

`launch` starts and watches ranks, `group` is how they talk, `wire` what is said, `sharding` splits a
decoder, `draws` draws tokens from shares of the vocabulary, `engine` is rank 0's engine and what the
other ranks do, `loading` puts them together.
"""
