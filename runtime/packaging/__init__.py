"""Makes what a revision runs of an upload: archives, the rules of which files count, requirements and Python environments.

Enter at `code.py` and `environment.py`. It knows no function, no revision and no worker.
"""
