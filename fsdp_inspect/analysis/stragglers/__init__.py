"""Ranks that make the others wait, and what they cost."""
