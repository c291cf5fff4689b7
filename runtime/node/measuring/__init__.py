"""Measures what each function takes and does over time, memory, usage and load, and limits the memory of idle functions.

Start reading at `node_memory.py`. Billing, the console and `explain` show the figures.
"""
