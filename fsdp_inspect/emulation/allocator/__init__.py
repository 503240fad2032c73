"""A model of CUDA's caching allocator, which predicts reserved memory without a GPU."""
