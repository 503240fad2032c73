"""Find the runs that fit into a device's memory, with forecasts."""
