"""The gateway's own HTTP surface: invoke, control routes, the guard before every route, and the OpenAPI description.

Enter at `invoke.py` (`POST /invoke/{function}`) or `admin.py` (control routes). It translates HTTP to invocations and jobs
and owns no state. It must not import a dialect or a command.
"""
