"""From examples and rollouts to micro-batches of packed rows."""
