"""The functions of this machine, and their processes.

`functions` deploys and keeps functions, `packaging` builds their code and environments. `reconciling` is the only room that starts and ends
workers: it asks `scaling` (pure policy), and acts through `launching`. `measuring` records memory and usage. Enter at
`functions/registry.py` for a deploy, at `reconciling/reconciler.py` for the number of workers.
"""
