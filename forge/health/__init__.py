"""Checks of the node, its devices and its peers."""
