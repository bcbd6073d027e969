"""What only one algorithm needs, and the metrics of a step."""
