"""Grammars of users, compiled and followed in processes that can be killed.

One process, the host, has the tokenizer's table and forks a worker for each grammar. A worker compiles its grammar
and follows it for all sessions with that grammar. It is killed when it exceeds a limit, and when nobody needs it.
"""
