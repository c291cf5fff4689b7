"""A client of a gateway for the command line: HTTP, options that commands share, printed output, exit codes.

Start reading at `client.py` and `options.py`. This room depends on no command.
"""
