"""The functions of this machine, and their processes.

`functions` deploys and keeps functions, `packaging` builds their code and environments. `reconciling` decides about workers: it asks
`scaling` (pure policy), and acts through `launching`. Only a worker whose call does not end is replaced by `calls/serving`. `measuring` records memory and usage. Enter at
`functions/rollouts.py` for a deploy, at `reconciling/reconciler.py` for the number of workers.
"""
