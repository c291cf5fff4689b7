"""The processes that run handlers: zygote, worker, and the runners inside a worker.

Enter at `zygote.py` (the process's `main`) or `worker.py`. It imports no HTTP server and nothing of the gateway.
"""
