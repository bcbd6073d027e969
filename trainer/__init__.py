"""The trainer: owns parameters, gradients and optimizer state; engines do the mathematics."""
