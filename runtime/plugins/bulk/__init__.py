"""Runs batches: each line of a JSONL input is a job. A batch can be resumed after any interruption.

Start reading at `submitter.py`. This package uses a gateway over HTTP only, and must not import its parts.
"""
