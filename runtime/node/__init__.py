"""The functions of this machine, and their processes.

`functions` deploys and stores functions. `packaging` builds their code and environments. `reconciling` decides how many
workers run: it asks `scaling` (pure policy), and starts and ends workers through `launching`. There is one exception:
`calls/serving` ends a worker whose call does not end. `measuring` records memory and usage. Enter at
`functions/rollouts.py` for a deploy, at `reconciling/reconciler.py` for the number of workers.
"""
