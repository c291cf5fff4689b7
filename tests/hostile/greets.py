"""Keeps 1,000 silent connections to the link socket, and opens a new one for each that is closed."""

import select
import socket
import time


def handler(event):
    until, held, closed = time.monotonic() + event["s"], {}, 0
    poll = select.poll()
    while time.monotonic() < until:
        while len(held) < 1000 and time.monotonic() < until:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(1)
            if sock.connect_ex(event["link"]):
                break
            held[sock.fileno()] = sock
            poll.register(sock, select.POLLIN)
        for number, _ in poll.poll(50):
            poll.unregister(number)
            held.pop(number).close()
            closed += 1
    return closed
