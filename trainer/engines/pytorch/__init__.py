"""The parts that all engines on PyTorch share."""
