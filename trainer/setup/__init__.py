"""Builds a `Run` from settings, devices, data, network and strategy."""
