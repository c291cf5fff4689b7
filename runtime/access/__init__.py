"""Who may do what: API keys, scopes, quotas, and the secrets of functions.

Enter at `keyring.py` (keys) or `secrets.py`. It must not know any route: the guard and the control routes are in `api`.
"""
