"""Batches of sequences: the samples that one rank trains on in one step."""
