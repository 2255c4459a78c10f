"""A job's own directory: its small files, identity, ledger and verdict."""
