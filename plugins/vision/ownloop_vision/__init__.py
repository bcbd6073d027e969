"""Images: from a message's images to tokens and patches, a tiny model, and a task to try it on.

`qwen_vl.py` computes such rows, and `image_prompts.py` hands them to vLLM.
"""
