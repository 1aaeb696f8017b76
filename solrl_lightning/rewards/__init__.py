"""Rewards: images and prompts in, one float32 score per image out."""
