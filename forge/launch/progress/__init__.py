"""What a launcher shows of its jobs."""
