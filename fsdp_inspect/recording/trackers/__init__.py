"""Log the numbers of each step to experiment trackers, from background threads of rank 0."""
