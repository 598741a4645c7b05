"""One request on the target and on the draft service, and what is left with the target ahead of time."""
