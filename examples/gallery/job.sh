#!/bin/bash
#SBATCH --job-name=first
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --time=02:00:00 --signal=USR1@120
#SBATCH --requeue --open-mode=append
#SBATCH --output=first.log
srun --kill-on-bad-exit=0 --wait=0 python without_hydra.py --name first
