#!/bin/bash
# 2 nodes, 4 workers on each. Written by `lockstep script slurm`; submit it with `sbatch FILE`.

#SBATCH --job-name=cifar
#SBATCH --account=abc123
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=1-12:00:00
#SBATCH --output=%x-%j.out
# Requeue the job after preemption, or on request below, with the same job ID, and append to its output.
#SBATCH --requeue
#SBATCH --open-mode=append
# Send SIGUSR1 to this script 120 seconds before the time limit.
#SBATCH --signal=B:USR1@120

module load cuda
source venv/bin/activate

# Forward signals to the launcher, which stops all workers after the same step, with a checkpoint.
launcher=
signals=
forward() {
    signals="$signals $1"
    kill -s "$1" $launcher 2>/dev/null
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

# --run-dir and --resume auto were added: a restarted job resumes this run, and no other.
lockstep run -- \
    lockstep train cifar10 -a resnet18 --run-dir "runs/cifar-$SLURM_JOB_ID" --resume auto &
launcher=$!
for signal in $signals; do  # signals that arrived before the launcher's pid was known
    kill -s "$signal" "$launcher"
done

# `wait` returns when the launcher exits, but also when a signal arrives; wait again then.
while
    before=$signals
    wait "$launcher"
    code=$?
    [ "$signals" != "$before" ]
do :; done

# 75: stopped after a checkpoint. Requeue the job unless it was cancelled and is no longer RUNNING.
if [ "$code" -eq 75 ]; then
    state=$(squeue --all --noheader --format=%T --jobs="$SLURM_JOB_ID")
    [ "$state" != RUNNING ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
