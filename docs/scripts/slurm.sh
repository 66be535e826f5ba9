#!/bin/bash
# One training on two machines with four GPUs each: sbatch slurm.sh train.py
#SBATCH --job-name=pyro-dropout
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
script=${1:?"Name the script, as in: sbatch slurm.sh train.py"}
processes=${PROCESSES_PER_NODE:-4}
nodes=${SLURM_JOB_NUM_NODES:-1}
first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-localhost}" 2>/dev/null | head -n 1 || true)
# Two minutes before the end SLURM sends SIGTERM; fit(checkpoint=...) writes a checkpoint, from which the script goes on when
# it is submitted again. The folder of the checkpoints must lie on a disk that all machines share.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# srun does not take over --cpus-per-task from sbatch: all processes would share one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
start=(torchrun --nnodes "$nodes" --nproc-per-node "$processes" --rdzv-backend c10d
  --rdzv-endpoint "${first:-localhost}:29400" --rdzv-id "${SLURM_JOB_ID:-one-machine}" "$script")
# On one machine too: the signal is sent to what srun started, and not to this script.
if [ -n "${SLURM_JOB_ID:-}" ]; then exec srun "${start[@]}"; fi
exec "${start[@]}"
