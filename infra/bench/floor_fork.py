"""The floor of starting a worker: fork a small process until the child's first byte is read. Run with -I -S.

Prints one JSON list of milliseconds.
"""

import os
import sys
import time


def fork_ms() -> float:
    """From just before fork() to the child's first byte; the child is reaped outside the clock."""
    reader, writer = os.pipe()
    started_ns = time.perf_counter_ns()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"!")
        os._exit(0)
    os.read(reader, 1)
    took_ns = time.perf_counter_ns() - started_ns
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    return took_ns / 1e6


if __name__ == "__main__":
    print([fork_ms() for _ in range(int(sys.argv[1]))])
