"""Shares that follow the ranks' speeds during a run."""
