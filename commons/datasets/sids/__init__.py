"""Semantic IDs of items: the map, its construction, and data sets with semantic IDs."""
