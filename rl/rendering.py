"""From a prompt to tokens, by the model's own tokenizer. What the model produced is never tokenised again."""

from pathlib import Path
from typing import Any

from rl.protocols import Prompt


class Renderer:
    """Encodes prompts for one model."""

    def __init__(self, model: Path) -> None:
        """`model` is a Hugging Face directory with a tokenizer."""
        from transformers import AutoTokenizer  # a second of import that `--help` should not pay

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens the model reads. Raises ValueError for a chat when the model has no chat template."""
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt, add_special_tokens=True))
        if not self._tokenizer.chat_template:
            raise ValueError("the prompt is a chat, but the model has no chat template; give the prompt as one string")
        begun = prompt[-1]["role"] == "assistant"
        return tuple(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in prompt],
                add_generation_prompt=not begun,
                continue_final_message=begun,
                return_dict=False,
            )
        )


def prompt_text(prompt: Prompt) -> str:
    """The prompt for a reader: text as it is, a chat as its messages' contents."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
