"""Checkpoints: written atomically, restored exactly."""
