"""What every loop needs around its algorithm: configuration, reporting, checkpoints, models."""
