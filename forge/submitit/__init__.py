"""`forge.Checkpointable`: a task for plain submitit, without Hydra."""
