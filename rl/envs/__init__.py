"""Environments, one file each, and what they share. A new one is a class with the methods of `rl.protocols.Env`."""
