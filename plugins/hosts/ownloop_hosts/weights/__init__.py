"""Weights over the network, to the hosts of generators."""
