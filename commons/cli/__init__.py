"""The `evenrank` command: one file per subcommand."""
