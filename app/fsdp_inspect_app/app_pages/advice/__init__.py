"""Page advice: its script, tables and charts."""
