"""Makes random ids. To save time, it reads the bytes of many ids from the kernel at once: each read gives up the interpreter's lock."""

from __future__ import annotations

import secrets

AT_ONCE = 256


class RandomIds:
    """Ids of `size_bytes` random bytes each, in hexadecimal digits. Any thread may take one."""

    def __init__(self, size_bytes: int) -> None:
        self._digits = 2 * size_bytes
        self._spare: list[str] = []

    def next(self) -> str:
        """Return a new id."""
        while True:
            try:
                return self._spare.pop()
            except IndexError:
                pass
            many = secrets.token_hex(AT_ONCE * self._digits // 2)
            self._spare += [many[start : start + self._digits] for start in range(0, len(many), self._digits)]
