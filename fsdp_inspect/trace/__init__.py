"""The data model of a run and its interval algebra, without files and without torch."""
