"""What the controller and the nodes tell each other, and how they find each other.

Start with `messages`: each is a frozen dataclass and a line of JSON. `pipes` carry them between a controller and its
nodes; nodes that are started manually have a `meeting`, which a `handshake` opens to who knows the job's secret;
`reachability` finds the addresses at which hosts reach the first one.
"""
