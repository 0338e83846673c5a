"""The workers' output, from the nodes to the terminal and to files.

Start with `display`, which prefixes lines and writes files; `worker_output` passes it the nodes' messages.
`line_splitter` splits bytes into lines, also of progress bars, and `tracebacks` delays tracebacks until the job's
failure is known.
"""
