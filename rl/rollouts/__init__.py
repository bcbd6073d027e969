"""Playing episodes: rendering, sampling, scoring, evaluating, and rollouts that run ahead of training."""
