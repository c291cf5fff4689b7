"""This package reports to a webhook when a condition of a function begins and when it ends.

`conditions.py` decides, and `alerts.py` observes the functions. The store and the sender of the jobs' webhooks also store and send these reports.
This package must not depend on HTTP routes.
"""
