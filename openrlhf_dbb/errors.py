"""The one exception that means: the user can fix this; print it in one line and exit with 2."""


class UsageError(Exception):
    """Names the thing, the value found, what is allowed and what to do next."""
