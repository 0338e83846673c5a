"""One host's part of a job, beside its workers; nothing of it stays behind.

Start with `node_process`, which obeys the controller, and `node_guard`, the process above it. `host_workers` is one
start of the workers, and `elastic_workers` are those of an elastic job, which come and go. `worker_starter` starts
them, `worker_watch` notices who has died and ends the others; `cpu_binding` and `gpus` share the machine out.
`parent_death` and `descendants` end what they have started, `dead_sockets` removes what the dead leave,
`snapshot_memory` keeps what outlives them. `job_store` serves the workers' store, and `function_worker` is a worker of
`run_function`.
"""
