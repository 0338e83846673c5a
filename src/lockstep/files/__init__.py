"""Reading what others wrote, and writing so that a crash loses nothing.

`atomic` writes a file whole or not at all; `untrusted` reads text, JSON and YAML within limits; `jsonl` is the form of
all records, `fields` are what may be taken from a damaged one, and `io_records` those of I/O; `resilient_file` keeps
what a full disk did not take; `folder_lock` lets one process at a time, on any host, write to a folder. Imports errors
alone; nothing of torch.
"""
