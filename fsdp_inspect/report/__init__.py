"""Render results for people and programs; each file renders one kind, and computes nothing."""
