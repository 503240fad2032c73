"""Analyse a recorded run: each module answers one question with one result object."""
