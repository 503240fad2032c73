"""Explain why a run hung, died or went wrong, from what its ranks left behind."""
