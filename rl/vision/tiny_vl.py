"""Tiny vision-language models with random weights: to try a loop, an engine or an environment with images in seconds.

Their words are few, their images small: an image of 32 x 32 pixels is one token, of 64 x 64 four.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
_UNKNOWN = "<unk>"
_WORDS = ("user", "assistant", "system")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
_VISION: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}


def tiny_qwen3_vl(path: Path, words: Sequence[str] = (), *, seed: int = 0, **options: Any) -> Path:
    """Writes a Qwen3-VL to `path` that knows these words; `options` go to its text configuration.

    The directory holds config, weights, tokenizer with chat template, and the settings of the image processor.
    """
    tokenizer = _tokenizer(words)
    config = Qwen3VLConfig(
        text_config={
            **_text(tokenizer),
            "head_dim": 32,
            "rope_parameters": {**_ROPE, "mrope_interleaved": True},
            **options,
        },
        vision_config={
            **_VISION,
            "out_hidden_size": options.get("hidden_size", _TEXT["hidden_size"]),
            "patch_size": 16,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
        },
        **_ids(tokenizer),
    )
    return _save(Qwen3VLForConditionalGeneration, config, tokenizer, path, seed)


def tiny_qwen2_5_vl(path: Path, words: Sequence[str] = (), *, seed: int = 0, **options: Any) -> Path:
    """Writes a Qwen2.5-VL of the same shape, whose vision tower has windows in its first layer."""
    tokenizer = _tokenizer(words)
    config = Qwen2_5_VLConfig(
        text_config={**_text(tokenizer), "rope_parameters": _ROPE, **options},
        vision_config={
            **_VISION,
            "out_hidden_size": options.get("hidden_size", _TEXT["hidden_size"]),
            "patch_size": 16,
            "window_size": 64,
            "fullatt_block_indexes": [1],
        },
        **_ids(tokenizer),
    )
    return _save(Qwen2_5_VLForConditionalGeneration, config, tokenizer, path, seed)


def _tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words between blanks."""
    special = [_UNKNOWN, *_SPECIAL, IMAGE_TOKEN, VIDEO_TOKEN]
    known = {word: number for number, word in enumerate(dict.fromkeys([*special, *_WORDS, *words]))}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": [*_SPECIAL[3:], "<|im_start|>", IMAGE_TOKEN, VIDEO_TOKEN]})
    made.chat_template = _TEMPLATE
    return made


def _text(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The text configuration but for rotary embeddings."""
    return {**_TEXT, "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}


def _ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The numbers of tokens that a configuration names."""
    texts = {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "eos_token_id": "<|im_end|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(text) for name, text in texts.items()}


def _save(model_class: Any, config: Any, tokenizer: PreTrainedTokenizerFast, path: Path, seed: int) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.08)
            elif "norm" in name and name.endswith("weight"):  # ones by default, which would hide a swapped norm
                torch.nn.init.uniform_(parameter, 0.8, 1.2)
            else:
                torch.nn.init.normal_(parameter, std=0.1)
    model.float().save_pretrained(path)
    tokenizer.save_pretrained(path)
    pixels = {"shortest_edge": 1 << 10, "longest_edge": 1 << 16}
    Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=pixels).save_pretrained(path)
    return path
