"""Build the tables of results that pages show and export as CSV."""
