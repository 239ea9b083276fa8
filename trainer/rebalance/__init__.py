"""Shares that follow the ranks' speeds during a run: what a rank's times say, what to change, and the change itself."""
