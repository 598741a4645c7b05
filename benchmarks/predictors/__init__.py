"""What predicts acceptance on traffic not yet seen: drafters, positions and prompts, ranked."""
