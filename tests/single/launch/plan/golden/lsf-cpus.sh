#!/bin/bash
# 1 node, 2 workers on each. Written by `lockstep script lsf`; submit it with `bsub < FILE`.

#BSUB -J lockstep
#BSUB -n 2
#BSUB -R "span[ptile=2]"
#BSUB -W 0:04
#BSUB -o lockstep-%J.out
# 1 minute before the time limit this script gets SIGUSR1.
#BSUB -wa USR1 -wt 1
# After the exit code 75, or the loss of a node, the job is queued again under its own number.
#BSUB -Q "75"
#BSUB -r

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

# 75: stopped after a checkpoint; LSF queues the job again. After SIGTERM (`bkill`) it shall not.
if [ "$code" -eq 75 ] && [[ $signals == *TERM* ]]; then
    code=143
fi
exit "$code"
