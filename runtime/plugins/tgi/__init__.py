"""This package offers language models to clients of Hugging Face's text-generation-inference (TGI), such as `InferenceClient`."""
