"""The connection between a gateway and its zygotes and workers.

`frames.py` has the wire format, `connection.py` both ends of a connection, `stream_credit.py` the flow
control of streams, `worker_spec.py` what a worker needs to know of its revision. The gateway and its workers
both use this room, so it must know neither.
"""
