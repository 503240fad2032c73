"""One presenter a file; nothing is computed here."""
