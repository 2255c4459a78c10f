"""Checkpoints: directories `step_<N>`, each either complete with checksums or absent.

`store` ties the folders together: claim a directory (`ownership`), copy and write the state
(`save`, in the layout of `format`), delete old checkpoints (`retention`), read one (`load`).
"""
