"""The communication thread and everything it owns: one exchange of a process with its peers.

Start with `channel`, the thread, and `request`, what it is asked for. `agreement` decides what all workers have in
common, over `control` (`piggyback` carries small payloads along; `mismatch` explains what they have not); `execution`
runs what was agreed and `fusion` decides what is fused, both by an `exchange` of `transfers` and `reduction` over the
`connections` and `process_groups`. `stall` reports who is missing, `timeline` records when what happened; `settings`
are Horovod's variables, `context` one job's objects, and `current` the one that is initialized.
"""
