"""Page SQL: its script."""
