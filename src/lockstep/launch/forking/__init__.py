"""Workers forked from one process that has imported torch, which then imports it once a host.

Start with `preloaded_process`, which imports and forks, and `forked_worker`, which makes of a forked process what a
fresh interpreter would be. `python_command` tells which commands can be forked, `held_back` keeps modules that a
script may replace from being found early, `late_environment` gives libraries the variables that they read at import,
and `process_title` shows the worker's own command in `ps`.
"""
