"""This package runs language models: rows of keys and values, a schedule of steps, sampling, and the text that comes out.

Start reading at `engine.py`. It has no model code: any causal model of transformers runs.
"""
