"""Emulate rank 0 of N on one device: FSDP2's real code and kernels, and a model of the network."""
