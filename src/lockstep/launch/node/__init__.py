"""One host's part of a job: start the workers, watch them, and clean up.

Start with `node_process`, which executes the controller's messages; `__main__` is its parent process, the guard.
`host_workers` is one generation of the workers, with their variables. `worker_starter` starts them, and the process of
their store; `worker_watch` detects failed workers and ends the others, except those that can stay for the next
generation; `progress_watch` detects that they hang, and inspects them. `hardware` finds the GPUs and divides the cores.
`parent_death` and `processes` end all processes that the workers started, and `job_folders` are the job's scratch
folder and its snapshots, which outlive the workers. `function_worker` is a worker of horovod.run and
lockstep.launch.run.
"""
