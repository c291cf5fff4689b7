"""Stores documents: small named bytes of a gateway, such as its API keys. One gateway stores them in files of its state folder.

Start reading at `documents.py`. This package must not know what a document holds.
"""
