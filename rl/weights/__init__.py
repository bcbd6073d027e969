"""Published weights: their manifest and records, how generators find them, and how the bytes travel."""
