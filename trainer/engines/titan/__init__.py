"""The default engine: torchtitan's own model specs and parallelisms.

Importing this package does not import torchtitan, so that the controller can use `layout_check` without it.
"""
