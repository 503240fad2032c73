"""Align the clocks of the ranks on one time axis."""
