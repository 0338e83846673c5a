"""The typed description of a training job. Without torch.

- `schema`: the configuration, one field per flag. Start here.
- `recipes`: complete configurations by name, in YAML.
- `mapping`: converts configurations to and from YAML and JSON.
- `flags`: derives a command's flags from its dataclass.
- `legacy_flags`: translates the flags of older scripts.
- `references`: imports the function that MODULE:FUNCTION names.
- `sizes`, `time_limit`: values of single flags.
- `run_names`: names of run folders.
- `resume_command`: the command that resumes a run.
"""
