"""What a run leaves: its files, and what can be read from them. Nothing here needs torch."""
