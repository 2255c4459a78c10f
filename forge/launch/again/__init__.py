"""`forge resume`: the jobs of a sweep start again from their directories, without Hydra"""
