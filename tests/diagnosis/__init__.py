"""Tests of the diagnosis of hangs and deaths."""
