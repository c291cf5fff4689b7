"""Creates the parts of a gateway in their order, and connects them.

Start reading at `server.py`. Each function closes what it has opened with the exit stack that it is given.
"""
