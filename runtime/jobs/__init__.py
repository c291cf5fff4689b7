"""Jobs: invocations stored in SQLite before their id is returned, and the webhooks that report their events.

Enter at `jobs.py`. `transaction.py` explains why no job is lost; every change of a job's state goes through it.
Webhook deliveries are rows of the same database, written in the same transactions. The room must not know HTTP routes.
"""
