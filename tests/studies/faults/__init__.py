"""Inject faults into trainings and compare the diagnoses with the faults."""
