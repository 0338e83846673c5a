"""Crash-safe writing, and reading of untrusted files.

`atomic` replaces files atomically, `untrusted` reads text, JSON and YAML within limits, and `jsonl` holds records, one
JSON object per line; `fields` accesses their fields, which may be damaged. `io_records` are the I/O rates of a job.
`resilient_file` buffers lines while the disk is full, `folder_lock` allows one writer per folder, across hosts, and
`checkpoint_listing` lists the checkpoints in a folder. Imports only `lockstep.errors`, and no torch.
"""
