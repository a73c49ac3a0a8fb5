"""Semantic IDs of items: their map, how it is made, and data sets of it."""
