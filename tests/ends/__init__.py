"""Ends of trainings under torchrun, with and without the recorder."""
