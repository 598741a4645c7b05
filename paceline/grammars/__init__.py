"""Grammars of users, compiled and followed in processes that can be ended.

One process, the host, has the tokenizer's table and forks a worker for each grammar. A worker compiles its grammar
and follows it for every session that has it; it is ended when it exceeds a limit, and when nobody wants its grammar.
"""
