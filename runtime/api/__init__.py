"""HTTP: the routes of pilotflame itself, and what every route shares, from body limits to the OpenAPI document.

Enter at `routes.py` (the table that describes every route) or `invoke.py` (`POST /invoke/{function}`). The room translates
HTTP to invocations and jobs and owns no state. It must not import a dialect or a command.
"""
