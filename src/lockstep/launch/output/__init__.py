"""What workers print, and how it reaches the user and the files.

Start with `display`, which names lines and writes files; `worker_output` feeds it with what the nodes send.
`line_splitter` makes lines of bytes, progress bars included, and `tracebacks` holds those back that say why a job
ended.
"""
