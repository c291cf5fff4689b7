"""Calls language models for plugins, and sends the answers in their protocols. Start reading at `answering.py`."""
