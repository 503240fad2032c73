"""The same step under another plan: FSDP2's schedule on virtual time, without torch."""
