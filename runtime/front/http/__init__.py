"""Holds the parts of HTTP that routes share: the route table, requests, responses, streams, TLS, CORS and logs.

Start reading at `routes.py`. This room itself defines no route.
"""
