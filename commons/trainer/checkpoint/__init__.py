"""Checkpoints: their content, and how they are written and loaded."""
