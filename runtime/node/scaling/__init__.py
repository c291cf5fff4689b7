"""Decides how many workers a revision has. It does no I/O and reads no clock.

Start reading at `desired_state.py`, which asks all mechanisms, and `table.py`, which combines their proposals and caps.

    load.py, revision_state.py, at_rest.py  yield proposals and caps
    keep_alive.py, ladder.py   plan for how long an idle function stays warm
    recent_load.py, recent_need.py, upstream.py  what was needed lately, and which calls are about to come
    allocation.py, eviction.py share what all functions together have too little of: workers, GPUs, memory
"""
