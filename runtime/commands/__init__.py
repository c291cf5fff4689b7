"""The command line: one module for each group of commands, the HTTP client they use, and the folder watch of `dev`.

Enter at `runtime/cli.py`, which registers every command. No other room imports from here, except `main.py` for the watch.
"""
