"""Crash-safe writing, and reading of untrusted files.

- `atomic`: replaces files atomically.
- `untrusted`: reads text, JSON and YAML of limited size.
- `jsonl`: reads and writes records, one JSON object per line, and their fields, which may be damaged.
- `metric_records`: collects the records of a run, for reports, the live view and the history of `fit`.
- `io_records`: computes the I/O rates of a job.
- `resilient_file`: appends lines, and buffers them while the disk is full.
- `folder_lock`: allows one writer per folder, across hosts.
- `output`: prints what a stream can take, and drops the rest.

Imports only `lockstep.errors`, and no torch.
"""
