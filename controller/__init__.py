"""Launching meshes, the typed handles, the reference loops (one page each) and the command line."""
