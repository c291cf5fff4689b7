"""How much memory of its own a process has in copies of weights."""

from __future__ import annotations

import re
from pathlib import Path

from pilotflame.snapshot.restoring.shared_copies import NAME


def copies_kb(pid: int) -> int:
    """Return the private memory of a process in its copies of weights, which it must have mapped, in kB.

    Pages that a process only reads are not its own.
    """
    text = Path(f"/proc/{pid}/smaps").read_text()
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
    copies = [entry for entry in entries if NAME in entry.partition("\n")[0]]
    assert copies
    return sum(int(count) for entry in copies for count in re.findall(r"Anonymous: +(\d+) kB", entry))
