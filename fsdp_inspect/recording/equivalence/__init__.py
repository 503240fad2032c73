"""Dump one step of a training, sharded or without sharding, for `fsdp-inspect equivalence`."""
