"""This package moves the jobs of one gateway, and its keys and secrets, into the database of several gateways.

Enter at `state_move.py`. It depends on the stores of both, `sqlite` and `postgres`. No other package of `jobs` may
depend on it.
"""
