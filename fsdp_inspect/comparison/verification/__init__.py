"""Verify a prediction: compare the run with what was predicted for it."""
