"""Tensor parallelism: one engine whose model, and whose vocabulary, is spread over ranks.

`launch` starts and watches ranks, `place` says where each stands, `group` is their transport and `wire` the format
of commands. `sharding` splits a decoder, `decoder` makes one rank's engine of it, and `draws` draws tokens from
shares of the vocabulary. `engine` is rank 0's engine and the loop of the other ranks; `loading` puts all together.
"""
