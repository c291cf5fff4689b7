"""The commands of the command line: one module for each group of commands, and a few modules that commands share.

Start reading at `runtime/cli.py`, which names the module of every command. Options, output, exit codes and the HTTP
client are in the room `client`. `cli.py` imports `lazy_group` and `first_process` from this package. `main.py` imports
`watch`, with which `dev` watches the folder.
"""
