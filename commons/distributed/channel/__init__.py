"""Between the ranks of a group: how they agree (agree), over which groups (groups), and who is missing (absence)."""
