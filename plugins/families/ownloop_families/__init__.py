"""Families of models that need more than a row in the core's table of dense decoders, a file each.

A file has the family's row, which an entry point names; its shape for torchtitan and `plan`; what is refused; and a
tiny model. It imports no torch, since the controller reads it. Layers that torchtitan lacks are in `titan/`.
"""
