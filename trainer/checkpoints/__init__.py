"""Checkpoints: written whole, read back exactly."""
