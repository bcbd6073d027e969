"""Tasks of other frameworks, which run in Python environments of their own: verifiers and Harbor."""
