"""Defines predictions, which Cog and Replicate have in common: requests, jobs shown as predictions, and webhooks.

This package is not a plugin. The plugins `cog` and `replicate` import it.
"""
