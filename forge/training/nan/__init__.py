"""One optimizer update under the NaN policy."""
