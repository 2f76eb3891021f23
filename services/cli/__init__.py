"""The ``aerie`` command."""
