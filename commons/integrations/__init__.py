"""evenrank in other training frameworks, one file for each; a framework is imported when its file is."""
