"""Page trends: its script, tables and charts."""
