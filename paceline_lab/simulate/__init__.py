"""A simulator of rounds: discrete events on a virtual clock, recorded acceptance, the coordinator's own planner."""
