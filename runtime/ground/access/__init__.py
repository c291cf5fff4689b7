"""Stores API keys, with their scopes and quotas, and the secrets of functions.

Start reading at `keyring.py` (keys) or `secrets.py`. This package must not use HTTP: the routes, and the code that
checks the keys of requests, are in `api`.
"""
