"""The command line: one module for each group of commands, and what they share.

Enter at `runtime/cli.py`, which names the module of every command. Shared are `options` (decorators),
`display` (output), `exit_codes`, `client` (HTTP) and `lazy_group`. Of the rest only `main.py` imports from
here: `watch`.
"""
