"""The analyses of a run side by side, one run beside another, and the runs of a folder."""
