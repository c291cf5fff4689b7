"""The parts of HTTP that routes share: the route table, requests, responses, server-sent events, TLS, cross-origin rules, logs of requests.

Enter at `routes.py`. This room knows no route.
"""
