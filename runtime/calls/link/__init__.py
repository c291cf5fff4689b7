"""Links connect a gateway with its zygotes and workers.

`frames.py` defines the wire format, `connection.py` both ends of a link, `poll_loop.py` the loop of a link
on a thread of its own, `stream_credit.py` and `exchange.py` the flow control of streams, and `worker_spec.py` what a worker needs to know about its revision. Gateway and workers both import
this package, so it must import no code of the gateway or of the worker.
"""
