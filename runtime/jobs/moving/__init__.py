"""This package moves what one gateway has stored into the database of several gateways.

Enter at `state_move.py`. It knows the stores of both; no other room of `jobs` may depend on it.
"""
