"""Starts the processes of a run, and gives each mesh its hosts and GPUs."""
