"""Makes what a revision runs of an upload: archives, files to leave out, requirements and Python environments.

Enter at `code.py` and `environment.py`. It knows no function, no revision and no worker.
"""
