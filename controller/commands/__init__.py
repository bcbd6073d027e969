"""The command line of `ownloop`. `command_line.py` has the table of its commands."""
