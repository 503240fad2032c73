"""Tables of results, one file a question; each is exported as CSV."""
