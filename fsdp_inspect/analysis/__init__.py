"""One question a file, one result object, pure numbers."""
