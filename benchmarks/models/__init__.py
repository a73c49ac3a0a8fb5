"""Benchmarks of models: attention, the cost model, and beam search."""
