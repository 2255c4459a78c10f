"""Checkpoints: directories `step_<N>`, each either complete with checksums or absent.

`store` ties the modules together. A directory is claimed (`fence`, `workspace`); the state is
copied (`staging`) and written (`writing`), in the layout of `format`; old checkpoints are removed
(`retention`, `removal`); one is read (`reading`, `files`, `inspection`).
"""
