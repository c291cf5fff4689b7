"""Who may do what: API keys, scopes, quotas, and the secrets of functions.

Enter at `keyring.py` (keys) or `secrets.py`. It must not know HTTP: the guard and the routes are in `api`.
"""
