"""Predicted against served: tokens a round and speed, over prompts, temperatures, drafters, lengths and load."""
