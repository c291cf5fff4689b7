"""This package offers language models to clients of OpenAI: it translates requests to the events of `handlers/language_model`."""
