"""A referee for servers that speak Tinker's protocol. It needs no part of ownloop."""
