"""Event sources: messages of a queue (SQS) run as jobs.

Enter at `sources.py`. A `Consumer` takes messages from a `MessageQueue`, submits each as a job and passes the output
to a `Sink`. The room must not know HTTP routes.
"""
