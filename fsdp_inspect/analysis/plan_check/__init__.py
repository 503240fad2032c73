"""Check the collectives of a run against its declared plan."""
