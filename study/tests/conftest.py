"""Stores and their rows, as the other tests have them."""

from conftest import fill, new_url, open_new, template

__all__ = ["fill", "new_url", "open_new", "template"]
