"""Rollouts: rendering prompts, playing episodes, evaluation, and a queue that runs ahead of training."""
