"""Where a run's metrics and samples go beside its own folder: TensorBoard, Weights & Biases, trackio."""
