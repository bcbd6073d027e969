"""The processes, the loops and the command line: what drives a trainer and a generator. Holds no weights."""
