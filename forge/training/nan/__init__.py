"""One update under the NaN policy."""
