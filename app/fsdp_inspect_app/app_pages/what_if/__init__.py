"""Page what_if: its script, tables and charts."""
