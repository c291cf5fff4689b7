"""This package runs stored jobs and reports their events to webhooks.

A job is an invocation that is stored before its id is returned. Start reading at `jobs.py`. `job_store.py` says what a
store does; `sqlite` and `postgres` each have one. This package must not depend on HTTP routes.
"""
