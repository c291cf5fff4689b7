"""This package stores jobs, runs them and reports their events to webhooks.

A job is an invocation that is stored in SQLite before its id is returned. Start reading at `jobs.py`.
Every change of a job's state goes through `transaction.py`, which explains why no job is lost. Webhook
deliveries are rows of the same database and are written in the same transactions.
This package must not depend on HTTP routes.
"""
