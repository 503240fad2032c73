"""Compare one run with other runs."""
