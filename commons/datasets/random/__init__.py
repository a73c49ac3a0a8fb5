"""Random data with any distribution of lengths."""
