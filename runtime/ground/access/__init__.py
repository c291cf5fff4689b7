"""Stores API keys, with their scopes and quotas, and the secrets of functions. Divides memory and threads among the owners of keys.

Start reading at `keyring.py` (keys), `secrets.py`, `deploy_policy.py` or `fair_share.py`. `access_watch.py` loads what another gateway has
changed. This package must not use HTTP: `front/http/guard.py` checks the keys of requests.
"""
