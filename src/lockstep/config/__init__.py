"""The typed description of a training job.

- `schema`: the configuration, one field per flag. Start here.
- `mapping`: converts configurations to and from YAML and JSON.
- `flags`: derives a command's flags from its dataclass.
- `legacy_flags`: translates the flags of older scripts.
- `references`: imports the function that MODULE:FUNCTION names.
- `sizes`, `time_limit`: values of single flags.
- `run_names`: names of run folders.
- `resume_command`: the command that resumes a run.

Imports only `lockstep.errors`, and no torch.
"""
