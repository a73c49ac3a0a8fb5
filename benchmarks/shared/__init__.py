"""What the programs share: ranks and timing, lengths, pages of results, and models of missing hardware."""
