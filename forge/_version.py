"""The version of forge, for its wheel and for what is written down."""

__version__ = "0.1.0"
