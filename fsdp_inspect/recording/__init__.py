"""Record a run of any `fully_shard` model. Needs torch."""
