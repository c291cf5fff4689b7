"""The store of jobs that several gateways share: PostgreSQL.

The room `sql` has the statements, and `ground/storing` the connections and tables. No other room of `jobs` may depend on this package.
"""
