"""Compare the planner with published trainings."""
