"""Measures what each function takes and does over time: memory, usage, load.

Start reading at `node_memory.py`. Billing, the console and `explain` show the figures.
"""
