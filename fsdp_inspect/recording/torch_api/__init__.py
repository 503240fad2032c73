"""Apply a plan to a model, and observe the plan of a model. Needs torch."""
