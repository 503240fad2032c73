"""The events and samples of a rank as the rows of its summary."""
