"""Accepts the connections of clients: sockets, TLS, limits for each client, and the addresses of clients behind proxies.

Start reading at `acceptor.py`. This package does not parse or answer requests.
"""
