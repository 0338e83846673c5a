#!/bin/bash
# 2 nodes, 4 workers on each. Written by `lockstep script pbs`; submit it with `qsub FILE`.

#PBS -N cifar
#PBS -A abc123
#PBS -q gpu
#PBS -l select=2:ncpus=32:mpiprocs=4:ompthreads=8:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=36:00:00
#PBS -j oe
# Let PBS restart the job, for example after a node failure.
#PBS -r y

# PBS starts jobs in the home directory.
cd "$PBS_O_WORKDIR" || exit 1

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

# PBS sends no signal at the time limit; `timeout` sends SIGUSR1 120 seconds earlier.
# --run-dir and --resume auto were added: a restarted job resumes this run, and no other.
timeout --foreground --preserve-status --signal=USR1 129480 lockstep run -- \
    lockstep train cifar10 -a resnet18 --run-dir "runs/cifar" --resume auto &
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

# 75: stopped after a checkpoint. A PBS job cannot requeue itself: submit this file again.
exit "$code"
