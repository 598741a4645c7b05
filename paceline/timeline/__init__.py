"""A request's rounds on a time axis: laid out from its records, for Perfetto and for a terminal."""
