"""Runs stored jobs and the messages of queues, and reports to webhooks.

`stored` runs durable jobs, `sqlite` stores them with the reports to webhooks, `webhooks` sends the reports, `events` turns messages of
queues into jobs, and `alerting` finds what is wrong with a function. Enter at
`stored/jobs.py`, or at `sqlite/transaction.py`, which explains why no job is lost.
"""
