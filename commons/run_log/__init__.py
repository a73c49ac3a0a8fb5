"""The files of a run, and reports and advice from them, without torch."""
