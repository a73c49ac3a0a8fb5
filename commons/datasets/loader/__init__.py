"""The loader of batches, by the name of a data set."""
