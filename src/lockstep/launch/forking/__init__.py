"""Fork a host's workers from one process that has imported torch, so that each host imports it once.

Start with `preloaded_process`, which imports and forks, and `forked_worker`, which makes a forked process behave like a
fresh interpreter. `python_command` decides which commands can be forked, `deferred_modules` hides preloaded modules
until the script imports them, and `late_environment` applies variables that libraries read at import.
"""
