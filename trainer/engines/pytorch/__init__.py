"""What every engine built on PyTorch shares."""
