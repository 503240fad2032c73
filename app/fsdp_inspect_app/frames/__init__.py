"""Tables of results, which pages show and export as CSV."""
