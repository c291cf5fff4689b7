"""Serves the Open Inference Protocol (version 2), which clients of Triton and KServe use, over HTTP and gRPC.

Begin with `routes.py`, and with `grpc_server.py`, which listens only if the gateway's setting `plugin_ports` names it.
Functions are models, and revisions their versions. A function is a model if the fields of its event and its answer are
tensors (`handlers/tensors.py`). The gateway passes the values on without decoding them.
"""
