"""Model directories with the chat templates of known families, in short, and a tokenizer of single bytes."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def _template(before: str, after: str, end: str, opened: str, *, first: str = "", content: str = "m.content") -> str:
    """A template that writes every message in the same way: role, content and end."""
    message = f"{{{{ '{before}' + m.role + '{after}' + ({content}) + '{end}' }}}}"
    shown = f"{first}{{% for m in messages %}}{message}{{% endfor %}}"
    return f"{shown}{{% if add_generation_prompt %}}{{{{ '{opened}' }}}}{{% endif %}}"


CHATML = _template("<|im_start|>", "\\n", "<|im_end|>\\n", "<|im_start|>assistant\\n")
_QWEN3 = """{%- set last = namespace(question=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {%- set content = m.content.split('</think>')[-1].lstrip('\\n') -%}
        {%- set reasoning = '' -%}
        {%- if '</think>' in m.content -%}
            {%- set reasoning = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
        {%- endif -%}
        {%- if loop.index0 > last.question and (loop.last or reasoning) -%}
            {%- set content = '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
_GPT_OSS = """{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
    {%- else -%}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}"""
TEMPLATES = {
    "chatml": CHATML,
    "qwen3": _QWEN3,
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + "
    "' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama3": _template(
        "<|start_header_id|>",
        "<|end_header_id|>\\n\\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
        first="{{ bos_token }}",
        content="m.content | trim",
    ),
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + eos_token }}{% endif %}{% endfor %}",
    "gemma": _template(
        "<start_of_turn>",
        "\\n",
        "<end_of_turn>\\n",
        "<start_of_turn>model\\n",
        first="{{ bos_token }}",
        content="m.content | trim",
    ).replace("m.role", "('model' if m.role == 'assistant' else m.role)"),
    "gpt_oss": _GPT_OSS,
    "glm": _template("<|", "|>\\n", "", "<|assistant|>\\n", first="[gMASK]<sop>"),
}
ENDS = {
    "chatml": ["<|im_end|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "llama2": ["</s>"],
    "llama3": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    "mistral": ["</s>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "gpt_oss": ["<|return|>", "<|endoftext|>"],
    "glm": ["<|endoftext|>", "<|user|>", "<|observation|>"],
}
"""The tokens at which the generator stops; the first is the tokenizer's `eos_token`."""
CLOSINGS = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama2": " </s>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "gpt_oss": "<|end|>",
    "glm": "",
}
"""What the template puts behind an earlier answer."""
_STARTS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>"}
_OTHERS = (
    *("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<|start|>", "<|channel|>"),
    *("<|message|>", "<|end|>", "<|im_end|>", "[gMASK]", "<sop>", "<|assistant|>", "<|system|>"),
)


def chat_model(
    path: Path,
    family: str = "chatml",
    *,
    template: str | None = None,
    ends: Sequence[str] = (),
    starts: str | None = None,
    adds: str = "",
    spaced: bool = False,
) -> Path:
    """Writes a directory with a tokenizer, whose tokens are bytes and control tokens, and a chat template.

    `starts` is the tokenizer's `bos_token`; the tokenizer `adds` control tokens to a text, by a pattern such as
    "<s> $A </s>". `spaced` is a tokenizer that puts a space in front of every text, as Llama 2 has one.
    """
    stops, starts = list(ends) or ENDS[family], starts or _STARTS.get(family, "<s>")
    if spaced:
        alphabet = ["\u2581", *map(chr, range(32, 127)), "\n"]
        tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace()
    else:
        vocabulary = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*dict.fromkeys([starts, *stops, *(_OTHERS if not spaced else ())])])
    tokenizer.add_tokens(["<think>", "</think>"])
    if adds:
        added = [(text, tokenizer.token_to_id(text)) for text in adds.split() if text != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=added)
    written = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=starts, eos_token=stops[0])
    written.chat_template = TEMPLATES[family] if template is None else template
    written.save_pretrained(path)
    numbers = [tokenizer.token_to_id(text) for text in stops]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": numbers}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return path
