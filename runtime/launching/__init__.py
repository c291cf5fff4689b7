"""Launches the processes of revisions: zygotes, workers, and the node's fetcher.

Start reading at `launcher.py`, the interface that `runtime/serving` uses. `process_launcher.py` implements it
with processes of this machine, which `zygote_process.py` controls. A launcher of containers, or of a cluster,
would be one more module beside `process_launcher.py`, and `runtime/main.py` would choose one of them.
`listener.py` accepts the connections of launched processes. `fetcher.py` is the process that fetches
snapshots to this node, and `fetcher_client.py` is the gateway's side of it. This package must not import
queues or HTTP.
"""
