"""Follow a live run: its state, its last steps and the numbers for monitors."""
