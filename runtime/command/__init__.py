"""The command line, and the clients for Python programs.

`commands` has the commands, `client` the client of a gateway, options and printed output, and `calling` the clients for programs.

Start reading at `runtime/cli.py`, which names the module of each command and defines `serve` and `dev`, or at
`client/client.py`. Plugins add commands: `build`, `chat`, `simulate`.
"""
