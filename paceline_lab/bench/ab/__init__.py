"""Arms beside each other, in turns, in one run: `paceline bench ab`."""
