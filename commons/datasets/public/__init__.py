"""Public data sets: readers of their raw files."""
