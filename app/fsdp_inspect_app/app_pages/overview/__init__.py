"""Page overview: its script, tables and charts."""
