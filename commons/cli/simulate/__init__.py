"""`evenrank simulate`: predicts what balancing would gain, from lengths or from a run's config."""
