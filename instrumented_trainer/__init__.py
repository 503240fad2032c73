"""A training loop that shows its own cost: FSDP Inspect's reference client."""
