"""The version of evenrank; pyproject.toml and `evenrank.__version__` take it from here."""

__version__ = "0.1.0"
