"""Environments: one file each. A new one is a class with the methods of `rl.protocols.Env`."""
