"""The processes of a run: starting them, the typed handles over them, and their errors."""
