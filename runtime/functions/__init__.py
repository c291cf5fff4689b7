"""What is deployed: the registry of live functions, the store on disk, and every step of a deploy.

Enter at `registry.py`. It must not know HTTP, jobs or event sources.
"""
