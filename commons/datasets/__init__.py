"""Data: HSTUBatch, random data, public data sets with their preprocessors, and the loader for all of them."""
