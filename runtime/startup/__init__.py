"""Creates the parts of a gateway in their order, and connects them.

Start reading at `server.py`. Each function registers the closing of what it opens with the exit stack that it gets.
"""
