"""One run compared with others."""
