"""Serves HTTP: a request comes in.

`http` has what all routes share and the steps that each request passes, `api` the routes of pilotflame, `pages` the console, and `generation`
calls language models for plugins. Enter at `api/invoke.py`, where a request becomes an invocation, or at `http/routes.py`, the rows of the
route table. `listening` accepts connections.
"""
