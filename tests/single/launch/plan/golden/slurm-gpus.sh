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
# A job that is preempted, or that asks for it below, is queued again under its own number,
# and goes on writing to the same file.
#SBATCH --requeue
#SBATCH --open-mode=append
# 120 seconds before the time limit this script gets SIGUSR1.
#SBATCH --signal=B:USR1@120

module load cuda
source venv/bin/activate

# Signals go on to the launcher, which stops all workers after the same step, with a checkpoint.
launcher=
signals=
forward() {
    signals="$signals $1"
    kill -s "$1" $launcher 2>/dev/null
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

# --run-dir and --resume auto were added: started again, this run goes on, and no other.
lockstep run -- \
    lockstep train cifar10 -a resnet18 --run-dir "runs/cifar-$SLURM_JOB_ID" --resume auto &
launcher=$!
for signal in $signals; do  # those that arrived before the launcher's pid was known
    kill -s "$signal" "$launcher"
done

# `wait` returns when the launcher exits, and also when a signal arrives: then wait again.
while
    before=$signals
    wait "$launcher"
    code=$?
    [ "$signals" != "$before" ]
do :; done

# 75: stopped after a checkpoint. The job is queued again unless it was cancelled,
# in which case it does not count as running any more.
if [ "$code" -eq 75 ]; then
    state=$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")
    [ "$state" != RUNNING ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
