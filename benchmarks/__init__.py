"""One program per question; results are dated pages in benchmarks/results."""
