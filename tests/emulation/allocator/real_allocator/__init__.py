"""Torch's own caching allocator on a device that does not exist."""
