"""Ranks: how a process becomes one, how it ends, and what happens where one is missing."""
