"""evenrank in other training frameworks, one module for each; it imports its framework."""
