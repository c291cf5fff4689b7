"""The room of what gateways store, and of PostgreSQL: documents, connections and migrations.

Start reading at `documents.py`: small named bytes, such as API keys. This package must not know what a document holds.
"""
