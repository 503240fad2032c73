"""Page compare: its script, tables and charts."""
