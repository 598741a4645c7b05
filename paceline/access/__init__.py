"""Who may send requests, and how many: API keys, their file, their limits. Knows no transport."""
