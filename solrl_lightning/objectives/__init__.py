"""Losses, one per file, as functions of tensors. All take velocities [B, ...] and give the mean and its rows [B]."""
