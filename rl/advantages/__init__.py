"""Advantages from rewards: relative to a group, or with a critic (GAE); also KL estimates."""
