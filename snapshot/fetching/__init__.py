"""Fetching a snapshot's bytes into files: ranges over several connections, verified as they land. Enter at `fetch`; knows no cache."""
