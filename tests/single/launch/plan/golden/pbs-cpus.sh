#!/bin/bash
# 1 node, 2 workers on each. Written by `lockstep script pbs`; submit it with `qsub FILE`.

#PBS -N lockstep
#PBS -l select=1:ncpus=8:mpiprocs=2:ompthreads=4
#PBS -l place=scatter
#PBS -l walltime=00:04:00
#PBS -j oe
# Let PBS restart the job, for example after a node failure.
#PBS -r y

# PBS starts jobs in the home directory.
cd "$PBS_O_WORKDIR" || exit 1

# Add commands here that make `lockstep` available, such as: source venv/bin/activate

# Forward signals to the launcher, which stops all workers after the same step, with a checkpoint.
launcher=
signals=
forward() {
    signals="$signals $1"
    kill -s "$1" $launcher 2>/dev/null
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

# PBS sends no signal at the time limit; `timeout` sends SIGUSR1 60 seconds earlier.
# If the job is restarted, the command must itself resume from its newest checkpoint.
timeout --foreground --preserve-status --signal=USR1 180 lockstep run -- \
    python 'my script.py' --name 'it'"'"'s' &
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
