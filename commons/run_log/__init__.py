"""What a run leaves: its files, and what they say of it. Nothing here needs torch."""
