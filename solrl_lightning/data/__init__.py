"""Prompt sources, the sets for training and evaluation, and the prompts of an iteration."""
