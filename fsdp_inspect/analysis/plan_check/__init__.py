"""The collectives that ran against the plan that was declared."""
