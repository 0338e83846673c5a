"""The messages between the controller and the nodes, and how nodes find each other.

Start with `messages`: each is a frozen dataclass and a line of JSON, carried by pipes between a controller and its
nodes, or by sockets between manually started nodes, after a `handshake` that proves that they have the job's secret.
`reachability` finds the addresses at which other hosts reach the first one.
"""
