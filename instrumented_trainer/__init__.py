"""A training loop that records itself: FSDP Inspect's reference client."""
