"""Checks for ownloop: parity, compare, sweep, check-env and check-engine."""
