"""Instruments for ownloop: rollouts under another reward, a micro-batch as a file, why two trainings differ."""
