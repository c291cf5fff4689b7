"""This package runs the messages of event sources, which are SQS queues, as jobs.

Start reading at `sources.py`. A `Consumer` receives messages from a `MessageQueue`, submits each message as a
job and passes the job's output to a `Sink`. This package must not depend on HTTP routes.
"""
