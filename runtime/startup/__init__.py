"""Creates the parts of a gateway in their order, and connects them.

Start reading at `server.py`. Each function gets an exit stack, with which it registers how to close what it opens.
"""
