#!/bin/bash
# 1 node, 2 workers on each. Written by `lockstep script slurm`; submit it with `sbatch FILE`.

#SBATCH --job-name=lockstep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=00:04:00
#SBATCH --output=%x-%j.out
# A job that is preempted, or that asks for it below, is queued again under its own number,
# and goes on writing to the same file.
#SBATCH --requeue
#SBATCH --open-mode=append
# 60 seconds before the time limit this script gets SIGUSR1.
#SBATCH --signal=B:USR1@60

# What makes `lockstep` known here comes in this place, such as: source venv/bin/activate

# Signals go on to the launcher, which stops all workers after the same step, with a checkpoint.
launcher=
signals=
forward() {
    signals="$signals $1"
    kill -s "$1" $launcher 2>/dev/null
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

# Started again, the command must itself go on from its newest checkpoint.
lockstep run -- \
    python 'my script.py' --name 'it'"'"'s' &
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
