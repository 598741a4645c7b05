"""Every order in which a request's messages may come: a state model of the protocol, and the real code driven so.

docs/exactness.md says what is modelled, and how a failure is replayed.
"""
