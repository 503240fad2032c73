"""Simulate a step under another plan: FSDP2's schedule on virtual time, without torch."""
