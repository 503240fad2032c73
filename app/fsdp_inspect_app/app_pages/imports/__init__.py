"""Page imports: its script, tables and charts."""
