"""The ranks of a job, and how they agree on an action before any of them acts."""
