"""Forecast the peak memory of rank 0 of N with fake tensors, a fake process group and one step."""
