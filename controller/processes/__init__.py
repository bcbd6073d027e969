"""Processes of one mesh: how they start, how calls reach them, how they fail and end."""
