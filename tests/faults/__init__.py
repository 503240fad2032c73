"""Inject faults into trainings and compare what `diagnose` says with what was injected."""
