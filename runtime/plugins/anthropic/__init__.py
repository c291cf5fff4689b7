"""This package offers language models to clients of Anthropic's API."""
