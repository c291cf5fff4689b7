"""This package stores jobs and webhook deliveries in one SQLite file, for one gateway.

`sql` defines the statements. Among the packages of `jobs`, only `moving` may depend on this package. Only this
package may depend on sqlite3.
"""
