"""Adds up the usage of functions and its cost: accounts, daily budgets, and stored usage.

Start reading at `account.py`, which knows a revision only as a `Spender`.
"""
