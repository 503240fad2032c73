"""The memory of a run: peak, owners, growth, allocator."""
