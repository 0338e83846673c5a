#!/bin/bash
# 2 nodes, 4 workers on each. Written by `lockstep script flux`; submit it with `flux batch FILE`.

#flux: --job-name=cifar
#flux: --bank=abc123
#flux: --queue=gpu
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=129600s
#flux: --output=cifar-{{id}}.out

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

hosts=$(flux hostlist --expand --delimiter=:4, instance):4
# `timeout` sends SIGUSR1 120 seconds before the time limit.
# --run-dir and --resume auto were added: a restarted job resumes this run, and no other.
timeout --foreground --preserve-status --signal=USR1 129480 lockstep run -H "$hosts" -- \
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

# 75: stopped after a checkpoint. A Flux job cannot requeue itself: submit this file again.
exit "$code"
