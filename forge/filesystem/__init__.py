"""Files that nobody else decides on, and that are there after a power cut."""
