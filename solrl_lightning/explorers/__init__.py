"""Exploration in other processes, here or on other machines: `sampler` asks, `server` answers (task=explore)."""
