"""The gate: what a change may cost in memory and time, and whether it does."""
