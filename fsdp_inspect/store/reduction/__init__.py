"""Reduce the events and memory samples of a rank to the rows of its summary."""
