"""This package runs language models: rows of keys and values, a schedule of steps, and the text that comes out.

Start reading at `engine.py`. It has no model code: any causal model of transformers runs. `handlers/sampling` chooses the tokens.
"""
