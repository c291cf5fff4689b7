"""What may be configured: function settings (`pilotflame.toml`), gateway settings (environment), the state folder.

Enter at `settings.py`. It must not know who uses a setting.
"""
