"""The handler contract: what a user's `handler.py` may contain, and how it is found and called."""
