"""Deploys functions: holds the registry of live functions, the store on disk, and every step of a deploy.

Start reading at `registry.py`. This package must not use HTTP, jobs or event sources.
"""
