"""The runtime: a gateway that starts workers on demand, and those workers.

Enter at `cli.py` (the command line) or `main.py` (the gateway's process). Each folder is a room; a room imports only
from rooms on lower lines of the `layers` contract in pyproject.toml. `snapshot` and `handlers` do not know this package.
"""
