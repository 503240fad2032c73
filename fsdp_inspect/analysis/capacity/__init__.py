"""Which runs fit into a memory, by forecasts."""
