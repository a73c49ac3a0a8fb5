"""Ranks: start and end of a process, collectives, and errors about missing ranks."""
