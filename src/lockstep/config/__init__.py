"""The typed description of a training job.

Start with `schema`, its fields and what they mean; `mapping` takes it to and from YAML and JSON, `references` finds
what `module:function` names, `time_limit` reads times as batch systems write them, `device_choice` has the choices of
a device, `sizes` reads amounts of bytes, `flags` reads a command's flags from its dataclass, `legacy_flags` translates
those of older scripts, and `run_names` names a run after what is special about it. Imports errors; nothing of torch.
"""
