"""What the import and the build of a handler leave in a zygote, and what is done about it before and after a fork.

Enter at `leftovers.py`: it finds everything, renews in a forked child what can be renewed, and says why a handler's
workers must be spawned instead. One module per kind: `descriptors.py`, `generators.py`, `processes.py`, `signals.py`, `thread_state.py`,
`working_folder.py`. `import_watch.py` finds the module whose import has left something, `owners.py` the variable that refers to it.
`fork_safety.py` prepares the zygote for forks, and makes a forked child independent. `worker` uses this package, which must know only `link`.
"""
