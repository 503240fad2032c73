"""Predictions: their files, their history, verification and tuning."""
