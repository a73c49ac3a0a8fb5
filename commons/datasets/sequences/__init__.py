"""Preprocessed sequences: from events to parquet shards, and from these to batches."""
