"""Writes up to 4 GiB to each folder that it may write to."""

import os
import time


def handler(event):
    until, written = time.monotonic() + event["s"], {}
    while time.monotonic() < until:
        for folder in ("/tmp", "/dev/shm", "/", "/run", "/var/tmp", os.path.dirname(__file__)):
            count = 0
            try:
                with open(f"{folder}/full", "wb") as file:
                    while count < 4096:
                        count += file.write(bytes(1 << 20)) >> 20
            except OSError:
                pass
            written[folder] = max(count, written.get(folder, 0))
            try:
                os.unlink(f"{folder}/full")
            except OSError:
                pass
    return {folder: count for folder, count in written.items() if count}
