"""What a run shows of itself: meters, the log, sinks and traces."""
