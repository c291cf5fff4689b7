"""Webhooks: what is to be told to whom, signed, and sent until it was taken."""
