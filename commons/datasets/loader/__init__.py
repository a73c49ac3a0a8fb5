"""The loader of batches for a data set's name."""
