"""The command line: `commands` has the commands, `client` the client of a gateway, options and printed output.

Enter at `runtime/cli.py`, which names the module of each command and has `serve` and `dev`, or at `client/client.py`. Plugins add
commands: `build`, `chat`, `simulate`.
"""
