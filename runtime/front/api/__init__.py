"""Serves pilotflame's own HTTP routes.

Start reading at `invoke.py`, which serves `POST /invoke/{function}`, or at `http/routes.py`, which defines the rows of
the route table. This package turns HTTP requests into invocations and jobs. Other packages contain the functions, jobs
and keys. This package must not import a dialect or a command.
"""
