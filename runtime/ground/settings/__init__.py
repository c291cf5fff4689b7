"""Reads and validates the settings of functions and of the gateway, and locks the gateway's state folder.

Start reading at `function_settings.py` or `gateway_settings.py`. This package must not import code that uses
a setting.
"""
