"""Peak memory of rank 0 of N before anything runs: fake tensors, a fake process group, one step."""
