"""Page diagnosis: its script, tables and charts."""
