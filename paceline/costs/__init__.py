"""What steps cost and how often proposals are accepted, as measured: one model of each, for services and policy."""
