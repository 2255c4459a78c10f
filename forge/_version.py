"""The version of forge, for its wheel and for the files that it writes."""

__version__ = "0.1.0"
