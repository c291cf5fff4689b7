"""The parts of HTTP that routes share: the route table, requests, responses, server-sent events, TLS, cross-origin rules, logs of requests.

Start reading at `routes.py`. This room defines no route itself.
"""
