"""The only reader and writer of run folders."""
