"""Who the ranks of a job are, and what they agree on before any of them acts."""
