"""Page units: its script, tables and charts."""
