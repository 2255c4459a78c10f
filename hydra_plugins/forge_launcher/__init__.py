"""forge's Hydra plugins: thin shells, since Hydra executes these modules twice."""
