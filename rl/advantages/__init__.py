"""From rewards to advantages: relative to a group, by a critic (GAE), and KL terms."""
