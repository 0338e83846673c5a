"""One host's part of a job: start the workers, watch them, and clean up.

Start with `node_process`, which executes the controller's messages, and `node_guard`, its parent process.
`host_workers` is one start of the workers; `elastic_workers` are those of an elastic job, which start and exit
independently. `worker_starter` starts them; `worker_watch` detects failed workers and ends the others; `cpu_binding`
and `gpus` divide the machine among them. `parent_death` and `processes` end all processes that the workers started,
and `snapshot_memory` holds the snapshots that outlive the workers.
`job_store` serves the workers' store, and `function_worker` is a worker of `run_function`.
"""
