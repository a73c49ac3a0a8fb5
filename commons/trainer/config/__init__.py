"""Config files and flags: the dataclasses of settings, how they are read and checked."""
