"""Page runs: its script, tables and charts."""
