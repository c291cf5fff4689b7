"""This package reports to a webhook when a condition of a function begins and when it ends.

`conditions.py` decides, and `alerts.py` observes the functions. Jobs store and send the reports with their own webhooks.
This package must not depend on HTTP routes.
"""
