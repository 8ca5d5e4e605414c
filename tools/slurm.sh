#!/bin/bash
# Runs a training script on several nodes with Slurm, one process per GPU:
#
#     sbatch tools/slurm.sh train_lm.py --preset openwebtext-556M
#     sbatch --nodes 8 tools/slurm.sh train_electra.py --preset xl
#
# Submit it from the folder of the scripts, on a disk that all nodes share, with the Python environment active and the
# data prepared (python -m data.prepare --help). The same command resumes a stopped job. The number of nodes may change,
# if the number of processes divides the micro-batches of a step.

#SBATCH --job-name=nanoxmoe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue

set -euo pipefail
export OMP_NUM_THREADS=8
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc_per_node "$SLURM_GPUS_ON_NODE" \
    --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_backend c10d \
    --rdzv_endpoint "$first:29500" \
    "$@"
