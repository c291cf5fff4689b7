"""Serves HTTP: pilotflame's own routes, and the code that all routes share, for example the guard.

Start reading at `routes.py`, which defines the rows of the route table, or at `invoke.py`, which serves
`POST /invoke/{function}`. This package turns HTTP requests into invocations and jobs. The functions, jobs
and keys themselves belong to other packages. This package must not import a dialect or a command.
"""
