"""Exceptions that end a command with their one line; everything else is a fault of ours, with its traceback."""


class UsageError(Exception):
    """The user can fix this; exit code 2. Names the thing, the value found, what is allowed and what to do next."""


class RunError(Exception):
    """A run that has begun cannot go on; exit code 1. Names the thing, what was found, and what to do next."""
