"""Predictions of what drafting brings, before anything is deployed: passes, their replay, times and prices."""
