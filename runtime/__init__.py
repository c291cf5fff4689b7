"""The runtime: a gateway that starts workers on demand, and the workers.

Enter at `cli.py` (the command line) or `main.py` (the gateway's process). Six folders are wings, with rooms in them: `front`, `command`,
`jobs`, `node`, `calls` and `ground`. A wing imports only from wings on lower lines of the `layers` contract in pyproject.toml. `snapshot` and
`handlers` do not know this package.
"""
