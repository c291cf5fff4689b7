"""This package stores jobs and webhook deliveries in one SQLite file, for one gateway.

The room `sql` has the statements. No other room of `jobs` may depend on this package, and none but it on sqlite3.
"""
