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
# Send SIGUSR1 to this script 2 minutes before the time limit.
#BSUB -wa USR1 -wt 2
# Requeue the job with the same job ID after exit code 75 or a node failure.
#BSUB -Q "75"
#BSUB -r

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
    lockstep train cifar10 -a resnet18 --run-dir "runs/cifar-$LSB_JOBID" --resume auto &
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
