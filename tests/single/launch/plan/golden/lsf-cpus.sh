#!/bin/bash
# 1 node, 2 workers on each. Written by `lockstep script lsf`; submit it with `bsub < FILE`.

#BSUB -J lockstep
#BSUB -n 2
#BSUB -R "span[ptile=2]"
#BSUB -W 0:04
#BSUB -o lockstep-%J.out
# Send SIGUSR1 to this script 1 minute before the time limit.
#BSUB -wa USR1 -wt 1
# Requeue the job with the same job ID after exit code 75 or a node failure.
#BSUB -Q "75"
#BSUB -r

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

# 75: stopped after a checkpoint; LSF requeues the job, but must not after SIGTERM (`bkill`).
if [ "$code" -eq 75 ] && [[ $signals == *TERM* ]]; then
    code=143
fi
exit "$code"
