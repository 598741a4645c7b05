"""What is behind the gateway: the coordinators, and who calls them."""
