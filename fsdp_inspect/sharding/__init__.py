"""Apply a plan to a model, observe the plan that a model has. Needs torch."""
