"""This package calls language models for plugins, and sends the answers in their protocols."""
