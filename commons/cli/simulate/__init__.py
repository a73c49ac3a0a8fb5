"""`evenrank simulate`: what balancing would gain, from lengths or from a config of a run."""
