#!/bin/bash
# 1 node, 2 workers on each. Written by `lockstep script slurm`; submit it with `sbatch FILE`.

#SBATCH --job-name=lockstep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=00:04:00
#SBATCH --output=%x-%j.out
# Requeue the job after preemption, or on request below, with the same job ID, and append to its output.
#SBATCH --requeue
#SBATCH --open-mode=append
# Send SIGUSR1 to this script 60 seconds before the time limit.
#SBATCH --signal=B:USR1@60

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

# If the job is restarted, the command must itself resume from its newest checkpoint.
lockstep run -- \
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

# 75: stopped after a checkpoint. Requeue the job unless it was cancelled and is no longer RUNNING.
if [ "$code" -eq 75 ]; then
    state=$(squeue --all --noheader --format=%T --jobs="$SLURM_JOB_ID")
    [ "$state" != RUNNING ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
