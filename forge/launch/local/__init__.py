"""`hydra/launcher=local`: a sweep on one machine."""
