"""Stores documents, blobs and the index of revisions, in files or in PostgreSQL. Also has the membership of gateways that share a database.

Start reading at `documents.py`: small named bytes, such as API keys. This package must not know what a document contains.
"""
