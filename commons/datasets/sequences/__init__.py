"""Preprocessed sequences: from events to parquet shards, and from shards to batches."""
