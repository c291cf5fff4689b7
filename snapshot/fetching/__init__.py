"""Fetches a snapshot into files over several connections, without a cache.

The entry point is `fetch.fetch`.
"""
