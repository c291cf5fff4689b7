"""Deploys functions: contains the registry of live functions, the store on disk, and every step of a deploy.

Start reading at `rollouts.py` for a deploy, at `registry.py` for what is deployed now. This package must not use HTTP, jobs or event sources.
"""
