"""Every order in which a request's messages may come: the real code driven so.

docs/exactness.md says what must hold, and how a failure is replayed.
"""
