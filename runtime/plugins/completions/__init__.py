"""Defines chats and completions of OpenAI's API: requests, answers and errors.

This package is not a plugin. The plugins `anthropic`, `openai`, `runpod` and `tgi` import it.
"""
