"""The report of a run: one HTML page that holds its curves, its times, its samples and warnings in words."""
