"""Failures that a user can fix."""


class TrainError(Exception):
    """One line on what is wrong and what to try. Ends the process with exit code 1, without a traceback."""
