"""Jobs: invocations stored in SQLite before their id is given, and the webhooks that tell of them.

Enter at `jobs.py`. Every change of a job's state goes through `transaction.py`. It must not know how a request is spelled.
"""
