"""Runs stored jobs and the messages of queues, and reports to webhooks.

`stored` runs durable jobs. `sql` stores them with the reports to webhooks, in SQLite (`sqlite`) or PostgreSQL
(`postgres`). `moving` copies the stored rows from SQLite to PostgreSQL. `webhooks` sends the reports, `events` turns
messages of queues into jobs, and `alerting` finds what is wrong with a function. Enter at `stored/jobs.py`, or at
`sql/transaction.py`, which explains why no job is lost.
"""
