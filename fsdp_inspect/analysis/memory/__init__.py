"""Analyse the memory of a run: peak, owners, growth and allocator."""
