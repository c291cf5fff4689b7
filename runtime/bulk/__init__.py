"""Batches of lines: JSONL in, JSONL out, each line a job, resumable after any end.

Enter at `window.py`. It talks to a gateway over HTTP only and must not import the gateway's parts.
"""
