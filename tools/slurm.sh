#!/bin/bash
# A training script on several nodes under Slurm, one process a GPU:
#
#     sbatch tools/slurm.sh train_lm.py --preset openwebtext-556M
#     sbatch --nodes 8 tools/slurm.sh train_electra.py --preset xl
#
# Submit it from the folder of the scripts, which all nodes must see, with the Python environment active and the data
# prepared (python -m data.prepare --help). A job that was stopped goes on by the same command, on any number of nodes whose
# processes share out a step's micro-batches evenly.

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
