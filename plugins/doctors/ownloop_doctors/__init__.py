"""Checks for ownloop: parity, compare, sweep, regrade, check-env and check-engine."""
