"""Holds the steps that each request passes, and the parts of HTTP that routes share: the route table, requests, responses, streams.

Start reading at `chain.py`, the steps in their order, or at `routes.py`. This room itself defines no route.
"""
