"""Page ranks: its script, tables and charts."""
