"""The one kind of failure that a person may see: `str(error)` is one line that says what is wrong and what to try."""


class TrainError(Exception):
    """Ends the process with exit code 1 and this line, without a traceback."""
