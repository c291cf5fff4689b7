"""Measures the memory, the usage and the load of each function over time, and limits the memory of idle functions.

Start reading at `node_memory.py`. Billing, the console and `explain` show the figures.
"""
