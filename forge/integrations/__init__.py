"""Trainers of other libraries, built on forge's public API."""
