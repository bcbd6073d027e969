"""From messages to tokens, by the model's own tokenizer. What the model produced is never tokenised again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.protocols import Prompt

_MARK = "ownloop-marks-an-answer"  # stands for an answer in a rendered chat


class Renderer:
    """Encodes prompts, and what comes between two turns of the model, for one model."""

    def __init__(self, model: Path, max_model_len: int | None = None) -> None:
        """`model` is a Hugging Face directory with a tokenizer; `max_model_len` the generator's context, if known."""
        from transformers import AutoTokenizer  # a second of import that `--help` should not pay

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.max_model_len = max_model_len
        """Most tokens of a whole episode; None where nothing limits it but the generator's own check."""

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens the model reads. Raises ValueError for a chat when the model has no chat template."""
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt, add_special_tokens=True))
        return tuple(self._apply_template(prompt, tokenize=True, return_dict=False))

    def encode_reply(self, reply: Prompt, answer_tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens to append to a sequence that ends with the model's answer, up to where its next answer begins.

        Text is appended as it stands. Messages come in the chat template, which first closes the answer: with the token
        that the model ended its turn with, unless it did so itself. Raises ValueError as `encode` does.
        """
        if isinstance(reply, str):
            return tuple(self._tokenizer.encode(reply, add_special_tokens=False))
        chat = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}, *reply]
        text = str(self._apply_template(chat, tokenize=False))
        tokens = tuple(self._tokenizer.encode(text.rpartition(_MARK)[2], add_special_tokens=False))
        closed = len(answer_tokens) > 0 and tokens[:1] == (answer_tokens[-1],)
        return tokens[1:] if closed else tokens

    def _apply_template(self, chat: Prompt, **options: Any) -> Any:
        if not self._tokenizer.chat_template:
            raise ValueError("the prompt is a chat, but the model has no chat template; give the prompt as one string")
        messages = [dict(message) for message in chat if not isinstance(message, str)]
        begun = messages[-1]["role"] == "assistant"
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=not begun, continue_final_message=begun, **options
        )

    def encode_completion(self, completion: str) -> tuple[int, ...]:
        """The tokens of an answer that somebody wrote, and the token that ends it, as if the model had sampled them.

        Tokenised apart from the prompt, which the model never sees joined to its answer either. Raises ValueError for a
        tokenizer without an end token: nothing would teach the model to stop.
        """
        if self._tokenizer.eos_token_id is None:
            raise ValueError("the model's tokenizer names no end token (eos_token), which ends a completion")
        return (*self._tokenizer.encode(completion, add_special_tokens=False), self._tokenizer.eos_token_id)


def prompt_text(prompt: Prompt) -> str:
    """The prompt for a reader: text as it is, a chat as its messages' contents."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
