"""This package stores jobs and webhook deliveries in one SQLite file, for one gateway.

Start reading at `store.py`, which has the methods of `stored/job_store.py`. Every change of a job's state goes through
`transaction.py`, which explains why no job is lost. Webhook deliveries are written in the transaction that causes their event.
No other room of `jobs` may depend on this package, and none but it on sqlite3.
"""
