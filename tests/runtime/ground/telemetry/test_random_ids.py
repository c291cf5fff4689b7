"""Random ids differ, also if several threads take them at once, and have the requested size."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from pilotflame.runtime.ground.telemetry.random_ids import AT_ONCE, RandomIds


def test_ids_differ_in_all_threads() -> None:
    ids, count = RandomIds(10), 3 * AT_ONCE
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: [ids.next() for _ in range(count)], range(4)))
    taken = [one for some in found for one in some]
    assert len(set(taken)) == len(taken) == 4 * count
    assert all(re.fullmatch("[0-9a-f]{20}", one) for one in taken)
