"""Who may ask for what: API keys, scopes and quotas; and the secrets of functions."""
