"""Figures of results, one file per topic. Each figure has its table in `frames`."""
