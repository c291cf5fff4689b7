"""What may be configured: function settings (`pilotflame.toml`), gateway settings (environment), the state folder.

Enter at `function_settings.py` or `gateway_settings.py`. It must not know who uses a setting.
"""
