"""Batches of sequences: what one rank trains on in one step."""
