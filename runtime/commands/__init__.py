"""The commands of the command line: one module for each group of commands, and shared modules.

Start reading at `runtime/cli.py`, which names the module of every command. The shared modules are `options`
(decorators), `display` (output), `exit_codes`, `client` (HTTP) and `lazy_group`. `cli.py` imports from this
package, and `main.py` the folder watch of `dev`.
"""
