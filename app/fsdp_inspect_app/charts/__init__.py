"""Figures of results, one file a question; each figure has its table in `frames`."""
