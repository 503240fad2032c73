"""The gate: check a run against a baseline and limits of memory and time."""
