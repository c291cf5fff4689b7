"""Adds up what functions use and what that costs: accounts, budgets of a day, and the usage that is stored.

Enter at `account.py`. It knows a revision only as a `Spender`.
"""
