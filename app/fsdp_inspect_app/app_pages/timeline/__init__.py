"""Page timeline: its script, tables and charts."""
