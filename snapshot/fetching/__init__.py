"""Fetches a snapshot into files over several connections. The entry point is `fetch.fetch`."""
