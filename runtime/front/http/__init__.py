"""Defines the steps that each request passes, and the parts of HTTP that routes share: the route table, requests, responses, streams.

Start reading at `chain.py`, which defines the steps in their order, or at `routes.py`. This package defines no routes
of its own.
"""
