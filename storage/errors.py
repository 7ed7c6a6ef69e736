"""The one exception of this package."""


class StoreError(Exception):
    """A store cannot do what was asked; the one-line text says what, why and what to do next.

    The text never holds a password, and neither does anything chained to it that is printed.
    """
