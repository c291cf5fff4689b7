"""This package sends events of jobs and alerts to URLs. It defines a delivery, its signature, its request and its retries.

`sql` stores the deliveries and decides which are due. `stored` starts the sender and wakes it.
"""
