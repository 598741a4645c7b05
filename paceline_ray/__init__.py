"""The services as actors of a Ray cluster: placing, watching, scaling and ending them."""
