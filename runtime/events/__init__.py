"""Event sources: messages of a queue (SQS) run as jobs.

Enter at `sources.py`. A `Consumer` takes messages from a `Bus` and submits them as jobs. It must not know HTTP routes.
"""
