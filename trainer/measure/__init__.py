"""Runs that measure instead of training: a host alone, the network, its links."""
