"""What every other wing uses: settings, keys and secrets (`access`), usage and budgets (`billing`), metrics and logs (`telemetry`), documents (`storing`).

Enter at `settings/function_settings.py`, `settings/gateway_settings.py` or `access/keyring.py`.
"""
