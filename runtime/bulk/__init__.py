"""Batches of lines: JSONL in, JSONL out, each line a job; a batch can be resumed after any interruption.

Enter at `submitter.py`. This room talks to a gateway over HTTP only and must not import the gateway's parts.
"""
