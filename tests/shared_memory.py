"""How much memory of its own a process has in copies of weights."""

from __future__ import annotations

import re
from pathlib import Path

from pilotflame.snapshot.restoring.shared_copies import NAME


def copies_kb(pid: int) -> int:
    """Return how much private memory a process uses in its copies of weights, in kB. The process must have
    mapped them.

    Pages that a process only reads are not private.
    """
    text = Path(f"/proc/{pid}/smaps").read_text()
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
    copies = [entry for entry in entries if NAME in entry.partition("\n")[0]]
    assert copies
    return sum(int(count) for entry in copies for count in re.findall(r"Anonymous: +(\d+) kB", entry))
