"""Explain why a run hung, died or went wrong, from the files of its ranks."""
