"""Serves HTTP requests.

`http` defines what all routes share and the steps that each request passes. `api` serves pilotflame's own routes, and
`pages` the console. `generation` calls language models for plugins. `listening` accepts connections. Enter at
`api/invoke.py`, where a request becomes an invocation, or at `http/routes.py`, which defines the rows of the route
table.
"""
