"""Tiny vision-language models with random weights: to try a loop, an engine or an environment with images in seconds.

Their words are few, their images small: an image of 32 x 32 pixels is one token, of 64 x 64 four.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
_QWEN_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "eos_token_id": "<|im_end|>",
}
_UNKNOWN = "<unk>"
_WORDS = ("user", "assistant", "system")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
_GEMMA_SPECIAL = ("<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>")
_GEMMA_IMAGE, _GEMMA_START = "<image_soft_token>", "<bos>"
_LINE_BREAKS = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
_GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_GEMMA_IDS = {
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
    "image_token_index": _GEMMA_IMAGE,
    "eos_token_id": "<end_of_turn>",
}
_GEMMA_TOKENS, _GEMMA_SIDE = 4, 128  # tokens of an image, and pixels of its side
_TEXT: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
_VISION: dict[str, object] = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
_ROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}


def tiny_qwen3_vl(path: Path, words: Sequence[str] = (), *, seed: int = 0, **options: object) -> Path:
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


def tiny_qwen2_5_vl(path: Path, words: Sequence[str] = (), *, seed: int = 0, **options: object) -> Path:
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


def tiny_gemma3(path: Path, words: Sequence[str] = (), *, seed: int = 0, **options: object) -> Path:
    """Writes a Gemma 3 of the same shape, with a layer of each kind. Every image is four tokens."""
    tokenizer = _gemma_tokenizer(words)
    text = {
        **_text(tokenizer),
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        **options,
    }
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config={**sizes, "image_size": _GEMMA_SIDE, "patch_size": 16, "vision_use_head": False},
        mm_tokens_per_image=_GEMMA_TOKENS,
        **_ids(tokenizer, _GEMMA_IDS),
    )
    processor = Gemma3ImageProcessorPil(size={"height": _GEMMA_SIDE, "width": _GEMMA_SIDE})
    _save(Gemma3ForConditionalGeneration, config, tokenizer, path, seed, processor)
    weights = load_file(path / "model.safetensors")
    # The name that published checkpoints have, and vLLM.
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()}
    save_file(named, path / "model.safetensors", {"format": "pt"})
    of_images = {"processor_class": "Gemma3Processor", "image_seq_length": _GEMMA_TOKENS}
    (path / "processor_config.json").write_text(json.dumps(of_images))
    return path


def _gemma_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    special = [*_GEMMA_SPECIAL, _GEMMA_IMAGE, _GEMMA_START]
    made = PreTrainedTokenizerFast(
        tokenizer_object=_words([_UNKNOWN, *special, "user", "model", "system", *words, *_LINE_BREAKS]),
        bos_token=_GEMMA_START,
        eos_token="<end_of_turn>",
        pad_token="<pad>",
        extra_special_tokens={
            "image_token": _GEMMA_IMAGE,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )
    made.add_special_tokens({"additional_special_tokens": ["<start_of_turn>"]}, replace_extra_special_tokens=False)
    line_breaks: Any = [AddedToken(text, normalized=False) for text in _LINE_BREAKS]
    made.add_tokens(line_breaks)
    made.chat_template = _GEMMA_TEMPLATE
    return made


def _words(known: Sequence[str]) -> Tokenizer:
    """A tokenizer of whole words between blanks."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys(known))}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = _words([_UNKNOWN, *_SPECIAL, IMAGE_TOKEN, VIDEO_TOKEN, *_WORDS, *words])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": [*_SPECIAL[3:], "<|im_start|>", IMAGE_TOKEN, VIDEO_TOKEN]})
    made.chat_template = _TEMPLATE
    return made


def _text(tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """The text configuration but for rotary embeddings."""
    return {**_TEXT, "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}


def _ids(tokenizer: PreTrainedTokenizerFast, texts: Mapping[str, str] = _QWEN_IDS) -> dict[str, Any]:
    """The numbers of tokens that a configuration names."""
    return {name: tokenizer.convert_tokens_to_ids(text) for name, text in texts.items()}


def _save(
    model_class: Any, config: object, tokenizer: PreTrainedTokenizerFast, path: Path, seed: int, processor: Any = None
) -> Path:
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
    processor = processor or Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=pixels)
    processor.save_pretrained(path)
    return path
