"""Page live: its script, tables and charts."""
