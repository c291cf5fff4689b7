"""What every other wing uses: settings, API keys and secrets (`access`), usage and budgets (`billing`), metrics and logs (`telemetry`).

Enter at `settings/function_settings.py`, `settings/gateway_settings.py` or `access/keyring.py`.
"""
