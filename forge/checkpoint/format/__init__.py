"""What a checkpoint is made of: its names, its manifest, and how state becomes bytes."""
