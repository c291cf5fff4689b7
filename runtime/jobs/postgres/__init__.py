"""The store of jobs that several gateways share: PostgreSQL.

`sql` defines the statements that both databases share, and `ground/storing` the connections and tables. Among the
packages of `jobs`, only `moving` may depend on this package.
"""
