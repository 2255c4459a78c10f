"""The format of a checkpoint: its file names, its manifest, and how state becomes bytes."""
