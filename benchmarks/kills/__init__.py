"""Runs that are hurt on purpose: what may happen to them, how it is made to happen, and what they make of it."""
