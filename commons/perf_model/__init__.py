"""What a sample costs, and which rank should compute it: workload models, the planner and the plan."""
