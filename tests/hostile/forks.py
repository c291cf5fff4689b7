"""Forks without end, in all of its processes."""

import os
import time


def handler(event):
    until, begun, refused = time.monotonic() + event["s"], os.getpid(), 0
    while time.monotonic() < until:
        try:
            os.fork()
        except OSError:
            refused += 1
    if os.getpid() != begun:
        os._exit(0)
    return refused
