"""The handler contract: what a user's `handler.py` may contain, and how it is found and called.

Users import `contract.py` (`batch`, `Context`), so it imports little. `resolve.py` returns the `Handler` in a user's
file; the dialects of plugins in `runtime/plugins` do this for other platforms. `codec.py` and `arrays.py` decode requests
and encode responses. This package must not import the runtime.
"""
