"""The same collective on several ranks."""
