"""Launches the processes of revisions: zygotes, workers, and the node's fetcher.

Enter at `launcher.py`, the interface that the serving room uses. `process_launcher.py` implements it with
processes of this machine, seen by `zygote_process.py`. A launcher of containers, or of a cluster, is one more
module beside `process_launcher.py`, and `runtime/main.py` chooses one. `listener.py` accepts the connections
of launched processes; `fetcher.py` is the process that brings snapshots to this node, `fetcher_client.py` the
gateway's side of it. This room must not know queues or HTTP.
"""
