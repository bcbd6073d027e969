"""Instruments for ownloop: recorded rollouts under another reward, and one micro-batch as a file."""
