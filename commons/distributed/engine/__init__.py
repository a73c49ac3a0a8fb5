"""The threads, sessions and handles behind a shuffler, for one batch (engine) and for several (window)."""
