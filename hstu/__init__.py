"""HSTU: the model, its shuffler, its configs and its training script."""
