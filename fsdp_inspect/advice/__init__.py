"""Advice on a run: changes of its plan with their gain, and problems to fix first."""
