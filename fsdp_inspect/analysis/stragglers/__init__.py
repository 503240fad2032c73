"""Find stragglers, the ranks that the other ranks wait for, and their cost."""
