"""This package moves the jobs of one gateway, and its keys and secrets, into the database of several gateways.

Enter at `state_move.py`. It knows the stores of both; no other room of `jobs` may depend on it.
"""
