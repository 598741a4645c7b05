"""`paceline plan`: what drafting would bring on the user's own texts, as a report, before anything is deployed."""
