"""What a run leaves on disk: its folder, its plots, and the comparison of two runs."""
