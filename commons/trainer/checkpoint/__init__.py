"""Checkpoints: what they hold, how they are written and found again."""
