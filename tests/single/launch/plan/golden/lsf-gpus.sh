#!/bin/bash
# 2 nodes, 4 workers on each. Written by `lockstep script lsf`; submit it with `bsub < FILE`.

#BSUB -J cifar
#BSUB -P abc123
#BSUB -q gpu
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -R "affinity[core(8)]"
#BSUB -gpu "num=4"
#BSUB -W 36:00
#BSUB -o cifar-%J.out
# 2 minutes before the time limit this script gets SIGUSR1.
#BSUB -wa USR1 -wt 2
# After the exit code 75, or the loss of a node, the job is queued again under its own number.
#BSUB -Q "75"
#BSUB -r

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
    lockstep train cifar10 -a resnet18 --run-dir "runs/cifar-$LSB_JOBID" --resume auto &
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
