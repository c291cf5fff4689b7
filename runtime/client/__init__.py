"""A client of a gateway for the command line: HTTP, options that commands share, what is printed, exit codes.

Enter at `client.py` and `options.py`. This room knows no command.
"""
