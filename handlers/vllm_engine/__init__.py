"""This package runs vLLM's engine behind our requests and answers, with weights from a snapshot.

Start reading at `model.py`. vLLM is no dependency: each function imports what it needs of it. `loader.py` runs in vLLM's
own processes. The package must not know the worker.
"""
