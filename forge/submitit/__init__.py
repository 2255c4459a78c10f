"""What plain submitit submits."""
