"""Tests of the model of CUDA's caching allocator."""
