"""Published weights: what they are, how they are found, and the memory that carries them."""
