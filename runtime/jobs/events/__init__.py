"""Runs the messages of event sources as jobs.

Start reading at `sources.py`. A `Consumer` receives messages from a `MessageQueue`, submits each message as a job and
passes the job's output to a `Sink`. Plugins implement queues and sinks (`message_queue.py`). This package must not
depend on HTTP routes.
"""
