"""Images, an optional part: from a message's images to tokens and patches, a tiny model, and a task to try it on.

`trainer/families/qwen_vl.py` computes such rows, and `generator/image_prompts.py` hands them to vLLM.
"""
