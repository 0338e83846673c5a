"""Derive a job's plan from options and environment. Nothing is started here.

Start with `job_plan`, which also describes a plan for --dry-run. `options` are the flags, `hosts` finds the hosts, and
`timings` holds all time limits. `worker_variables` are what workers get, of the launcher's environment and of their
rank info. `batch_script` writes a job's script for a batch system. `horovodrun_plan` translates Horovod's command line.
"""
