"""Runs batches: each line of a JSONL input is a job. A batch can be resumed after any interruption.

Start reading at `submitter.py`. This package calls the gateway over HTTP and must not import parts of the gateway.
"""
