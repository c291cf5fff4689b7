"""The processes that run handlers, and what runs inside them.

Enter at `zygote.py`, the `main` of a launched process, which forks workers; `worker.py` is the life of one
worker. `function_setup.py` builds and sets up a function in this process. `thread_runner.py` and
`loop_runner.py` run invocations, `batch_run.py` the groups of a batch handler. `first_touch.py` is the
process of `snapshot record`. Workers import no HTTP server and nothing of the gateway.
"""
