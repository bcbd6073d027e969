"""What a run leaves on disk: its folder, its pictures, and how two runs compare."""
