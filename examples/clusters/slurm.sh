#!/bin/bash
# Two nodes, one task each: phalanx run starts the ranks of its node. Queue it with: sbatch examples/clusters/slurm.sh
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@60
#SBATCH --open-mode=append

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" phalanx run examples/train_digits.py --epochs 100 --out runs/digits
