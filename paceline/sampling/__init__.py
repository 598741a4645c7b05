"""The mathematics of exact sampling: noise, races, processed distributions, acceptance. Pure."""
