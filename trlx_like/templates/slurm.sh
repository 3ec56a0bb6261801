#!/bin/bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={{ gpus }}
{% for option, value in given.items() if value is not none %}
#SBATCH --{{ option }}={{ value }}
{% endfor %}
#SBATCH --signal=USR1@{{ seconds }}
#SBATCH --requeue
#SBATCH --open-mode=append

# SLURM sends SIGUSR1 {{ seconds }} seconds before the time limit. The run is saved then and ends with 138 (128 + 10); it is
# queued again, and continues from its newest checkpoint.
srun trlx-like launch {{ words }}
code=$?
if [ "$code" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
