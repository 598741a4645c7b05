"""Drafters that read the target's hidden states: networks, and the engines that serve them."""
