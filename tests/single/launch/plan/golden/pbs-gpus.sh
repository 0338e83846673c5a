#!/bin/bash
# 2 nodes, 4 workers on each. Written by `lockstep script pbs`; submit it with `qsub FILE`.

#PBS -N cifar
#PBS -A abc123
#PBS -q gpu
#PBS -l select=2:ncpus=32:mpiprocs=4:ompthreads=8:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=36:00:00
#PBS -j oe
# PBS may start the job again, such as after the loss of a node.
#PBS -r y

# PBS starts jobs in the home folder.
cd "$PBS_O_WORKDIR" || exit 1

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

# PBS gives no signal ahead of the time limit: `timeout` sends SIGUSR1 120 seconds before.
# --run-dir and --resume auto were added: started again, this run goes on, and no other.
timeout --foreground --preserve-status --signal=USR1 129480 lockstep run -- \
    lockstep train cifar10 -a resnet18 --run-dir "runs/cifar" --resume auto &
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

# 75: stopped after a checkpoint. A PBS job cannot queue itself again: submit this file again.
exit "$code"
