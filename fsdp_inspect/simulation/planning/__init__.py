"""Find the fastest plan of a model within a budget of GPUs and memory, without a recorded run."""
