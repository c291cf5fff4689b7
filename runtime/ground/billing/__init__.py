"""Adds up the usage of functions and its cost: accounts, daily budgets, and stored usage.

Enter at `account.py`. It knows a revision only as a `Spender`.
"""
