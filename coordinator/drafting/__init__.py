"""Carries plans out: proposals are taken, announced, committed and prefetched as `coordinator.policy` plans it."""
