"""Defines predictions, which Cog and Replicate have in common: their requests, how a job is shown as one, and their webhooks.

It is no plugin itself. The plugins `cog` and `replicate` import it.
"""
