"""Page memory: its script, tables and charts."""
