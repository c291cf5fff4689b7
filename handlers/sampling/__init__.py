"""This package chooses the tokens of answers: from a model's logits, as the options, the limits and the grammar of a request permit.

Start reading at `sampler.py`. It knows the ids of tokens and the logits after them: no prompts, chats, tools or steps of an engine.
The engine (`handlers/language_model`) and the requests to vLLM (`handlers/vllm_engine`) import it.
"""
