"""`evenrank report`: what runs have logged, side by side."""
