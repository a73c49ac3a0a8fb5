"""The measurements of a run: meters, the log, sinks and traces."""
