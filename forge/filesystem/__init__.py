"""Files that other users cannot replace, and that survive a power cut."""
