"""The training loops, one page each. Copy one to write your own."""
