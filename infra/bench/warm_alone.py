"""A network of our own: loopback only, so that no other machine reaches the ports that Ray binds to every address.

A benchmark starts again inside `unshare --net`, which takes away no speed, and brings its loopback up. As an ordinary
user it needs user namespaces.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

_MARK = "BENCH_ALONE"
_SIOCSIFFLAGS = 0x8914
_UP_AND_RUNNING = 0x41


def enter() -> None:
    """Returns in a network namespace of its own; the first time this starts the program again."""
    if os.environ.get(_MARK) != str(os.getpid()):
        # exec keeps the process id, so no child of ours takes the mark for its own.
        os.environ[_MARK] = str(os.getpid())
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        os.execvp("unshare", ["unshare", "--net", *as_root, sys.executable, *sys.argv])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))
