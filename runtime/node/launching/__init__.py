"""Launches the zygotes and workers of revisions, and the node's fetcher.

Start reading at `launcher.py`, the interface that `reconciling` uses. `process_launcher.py` implements it with
processes of this machine, and `container_launcher.py` with containers (`container.py`) of docker or podman
(`container_engine.py`). Both control their zygotes through `zygote_process.py`. `LauncherByImage` chooses between them
for each function. A launcher for a cluster would be one more such module. `listener.py` accepts the connections of
launched processes. `fetcher.py` is the process that fetches snapshots to this node, and `fetcher_client.py` is the
gateway's client of that process. This package must not import queues or HTTP.
"""
