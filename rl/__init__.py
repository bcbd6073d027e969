"""What RL is made of: types, protocols, losses, advantages, rollouts, environments. Knows no actor and no engine."""
