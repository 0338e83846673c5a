"""The typed description of a training job. Without torch.

- `schema`: the configuration, one field per flag. Start here.
- `recipes`: complete configurations by name, in YAML.
- `mapping`: converts configurations to and from YAML and JSON.
- `flags`: derives a command's flags from its dataclass.
- `legacy_flags`: translates the flags of older scripts.
- `values`: sizes, time limits, and the functions that MODULE:FUNCTION names.
- `run_paths`: names of run folders, their checkpoints, and the command that resumes a run.
"""
