"""Other people's clients and harnesses against the gateway: `make compat`.

Each has a virtual environment of its own in `.compat/`, so that nothing changes the project's own packages.
"""
