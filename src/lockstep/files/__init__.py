"""Crash-safe writing, and reading of untrusted files.

| module | contents |
|---|---|
| `atomic` | atomic replacement of files |
| `untrusted` | text, JSON and YAML, read within limits |
| `jsonl` | records, one JSON object a line |
| `fields` | typed access to the fields of records that may be damaged |
| `io_records` | I/O rates of a job |
| `resilient_file` | a file whose lines are buffered while the disk is full |
| `folder_lock` | one writer per folder, across hosts |
| `checkpoint_listing` | the checkpoints in a folder |

Imports only `lockstep.errors`, and no torch.
"""
