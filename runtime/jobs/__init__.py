"""Runs stored jobs and the messages of queues, and reports to webhooks.

`stored` runs durable jobs, `events` turns messages of queues into jobs, and `webhooks` and `alerting` send reports. Enter at
`stored/jobs.py`, or at `stored/transaction.py`, which explains why no job is lost.
"""
