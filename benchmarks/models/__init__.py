"""What models cost: attention, the cost model, and beam search."""
