#!/bin/bash
# 1 node, 2 workers on each. Written by `lockstep script flux`; submit it with `flux batch FILE`.

#flux: --job-name=lockstep
#flux: --nodes=1
#flux: --exclusive
#flux: --time-limit=240s
#flux: --output=lockstep-{{id}}.out

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

hosts=$(flux hostlist --expand --delimiter=:2, instance):2
# `timeout` sends SIGUSR1 60 seconds before the time limit.
# If the job is restarted, the command must itself resume from its newest checkpoint.
timeout --foreground --preserve-status --signal=USR1 180 lockstep run -H "$hosts" -- \
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

# 75: stopped after a checkpoint. A Flux job cannot requeue itself: submit this file again.
exit "$code"
