"""Which rows of a data set each rank reads in each step."""
