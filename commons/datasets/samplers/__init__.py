"""Samplers: the rows of a data set that each rank reads in each step."""
