"""Soak: tens of thousands of random steps on gloo ranks, with every row accounted for and no resource that grows."""
