"""The one exception of this package."""


class StoreError(Exception):
    """A store cannot do what was asked; the message, one line, says what, why and what to do next.

    Neither the message nor anything chained to it contains a password.
    """
