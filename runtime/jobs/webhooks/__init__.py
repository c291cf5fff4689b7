"""This package sends an event of a job or an alert to an URL: what a delivery is, its signature, its request and its retries.

The room `stored` stores deliveries and decides when they are sent.
"""
