"""Losses, one per file: functions of velocities [B, ...] that return the loss, its terms, and one value per sample."""
