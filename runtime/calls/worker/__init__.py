"""The code of the processes that run handlers: zygotes and workers.

Start reading at `zygote.py`, which has the `main` of a launched process and forks workers. `worker.py` runs one worker
from its start to its exit: with the handler on the main thread and the link on another (`main_thread_worker.py`), or with both on one
event loop (`loop_worker.py`). `function_setup.py` builds a function in the process, `hooks.py` calls the function's hooks, and `incoming.py` turns frames into calls. `thread_runner.py` and
`loop_runner.py` run invocations, and `batch_run.py` runs the groups of a batch handler. `first_touch.py` is the process
that `snapshot record` starts. Workers must not import an HTTP server or code that only the gateway uses.
"""
