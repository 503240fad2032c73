"""One device as rank 0 of N: FSDP2's own code and kernels, and a model in place of the network."""
