"""`paceline bench speed`: drafters beside target-only, in interleaved pairs."""
