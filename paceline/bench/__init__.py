"""`paceline bench`: speed beside our own target-only, and beside other systems, in interleaved runs."""
