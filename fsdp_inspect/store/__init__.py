"""Read and write run folders. No other package accesses their files."""
