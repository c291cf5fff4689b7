"""The handler contract: what a user's `handler.py` may contain, and how it is found and called.

`contract.py` is what users import (`batch`, `Context`) and stays light. `resolve.py` makes a `Handler` of a
user's file; `dialects/` does so for the contracts of others. `codec.py` and `arrays.py` translate requests
and responses, `failure.py` describes what user code raised. This package must not know the runtime.
"""
