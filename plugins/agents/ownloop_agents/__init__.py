"""Trains programs: what a program reads and samples at an endpoint of a run's own generator becomes training data."""
