"""One invocation, from the queue of its revision to the handler and back, and the processes that run handlers.

`serving` has the queue and the dispatch in the gateway, `batching` decides the order and the batches, `link` carries frames, and `worker` has
the processes of a function: base, zygote and worker. `leftovers` finds what imports leave open before a fork. Enter at `serving/revision.py` in the gateway,
at `worker/zygote.py` in the process of a function.
"""
