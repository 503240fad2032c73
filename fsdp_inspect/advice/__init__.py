"""What to change in a run's plan, by how much that helps, and what to look at before."""
