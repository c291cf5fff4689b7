"""Stores jobs and webhook deliveries as rows, in the SQL that SQLite and PostgreSQL have in common.

Start reading at `store.py`, which has the methods of `stored/job_store.py`. Every change of a job's state goes through
`transaction.py`, which explains why no job is lost. Webhook deliveries are written in the transaction that causes their
event. The packages `sqlite` and `postgres` connect to the databases.
"""
