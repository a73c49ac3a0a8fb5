"""What a rank sends before the plan: rows with their costs, the schema, task calibrations and step times."""
