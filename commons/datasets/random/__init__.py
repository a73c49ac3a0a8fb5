"""Random data of any distribution of lengths."""
