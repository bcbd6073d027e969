"""Renders prompts and replies to tokens with the model's own tokenizer. Sampled tokens are never tokenised again."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.hf_config import end_token_ids, read_config
from rl.protocols import Problem, Prompt
from rl.rollouts.tokenizer import load_tokenizer
from rl.types import REASONING

_MARK = "ownloop-marks-an-answer"  # stands for the model's answer in a rendered chat
_LONGEST_OPENING = 64  # tokens that surely hold a delimiter of reasoning and the blanks after it


class Renderer:
    """Encodes prompts, replies between two turns, and given completions, for one model."""

    def __init__(self, model: Path, max_model_len: int | None = None) -> None:
        """`model` is a Hugging Face directory with a tokenizer; `max_model_len` is the generator's context length."""
        self._tokenizer = load_tokenizer(model)
        self._model = model
        self.max_model_len = max_model_len
        """Most tokens of a whole episode; None leaves the limit to the generator."""

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chats."""
        return bool(self._tokenizer.chat_template)

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """The tokens of a prompt, in which the chat template shows these tools, given as JSON schemas.

        Raises ValueError for a chat if the model has no chat template, and for tools if the template shows none.
        """
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt, add_special_tokens=True))
        plain = tuple(self._apply_template(prompt, tokenize=True, return_dict=False))
        if not tools:
            return plain
        shown = tuple(self._apply_template(prompt, tokenize=True, return_dict=False, tools=[*tools]))
        if shown == plain:
            raise ValueError(
                "the model's chat template shows no tools; ToolEnv.show_tools 'system' describes them in a message"
            )
        return shown

    def encode_problem(self, problem: Problem) -> tuple[int, ...]:
        """The tokens of a problem's prompt, with its tools if it has any."""
        tools: Sequence[Mapping[str, Any]] = getattr(problem, "tools", ())
        return self.encode(problem.prompt, tools)

    def opening(self, tokens: Sequence[int]) -> str:
        """The delimiter of `rl.types.REASONING` with which an encoded prompt ends, apart from blanks, or "" for none.

        Templates of models that always reason open the reasoning themselves.
        """
        end = str(self._tokenizer.decode([*tokens[-_LONGEST_OPENING:]], skip_special_tokens=False)).rstrip()
        return next((opening for opening in REASONING if end.endswith(opening)), "")

    def encode_reply(self, reply: Prompt, answer_tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens between the model's answer, which ends in `answer_tokens`, and its next answer.

        Text is encoded as it is. Messages are put through the chat template, which first closes the model's turn; the
        closing token is left out if the model has sampled it. Raises ValueError as `encode` does.
        """
        if isinstance(reply, str):
            return tuple(self._tokenizer.encode(reply, add_special_tokens=False))
        tokens = self._after_answer(reply)
        already_closed = len(answer_tokens) > 0 and tokens[:1] == (answer_tokens[-1],)
        return tokens[1:] if already_closed else tokens

    def _after_answer(self, reply: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The tokens that the chat template puts after an answer to which `reply` follows."""
        # A template renders whole chats only. So a short chat is rendered, and what follows its answer is taken.
        chat = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}, *reply]
        text = str(self._apply_template(chat, tokenize=False))
        return tuple(self._tokenizer.encode(text.rpartition(_MARK)[2], add_special_tokens=False))

    def _apply_template(self, chat: Prompt, **options: Any) -> Any:
        if not self._tokenizer.chat_template:
            raise ValueError("the prompt is a chat, but the model has no chat template; give the prompt as one string")
        messages = [dict(message) for message in chat if not isinstance(message, str)]
        prefilled = messages[-1]["role"] == "assistant"  # the model continues this message
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=not prefilled, continue_final_message=prefilled, **options
        )

    def encode_completion(self, prompt: Prompt, completion: str) -> tuple[int, ...]:
        """The tokens of a given answer to the prompt and the end token, as if the model had sampled them.

        The end token is the tokenizer's `eos_token`. After a chat it is the token with which the chat template closes a
        turn, if the generator stops at that: the two differ in Gemma 3 and Phi 3. The answer is tokenised apart from
        the prompt, as in sampling. Raises ValueError for a tokenizer without an end token: nothing would teach the
        model to stop.
        """
        end = self._tokenizer.eos_token_id if isinstance(prompt, str) else self._end_of_turn
        if end is None:
            raise ValueError("the model's tokenizer has no end token (eos_token), which a completion must end with")
        return (*self._tokenizer.encode(completion, add_special_tokens=False), end)

    @functools.cached_property
    def _end_of_turn(self) -> int | None:
        """The token that ends an answer in a chat.

        A model that learned to end with a token at which the generator does not stop would never stop. An example is
        `<|im_end|>` in Qwen's base models, which have the template of the instruct models; `eos_token` ends those.
        """
        stops_at = end_token_ids(self._model, read_config(self._model))
        after = self._after_answer([{"role": "user", "content": "-"}])
        return after[0] if after and after[0] in stops_at else self._tokenizer.eos_token_id


def prompt_text(prompt: Prompt) -> str:
    """The prompt as plain text for a reader: of a chat, the contents of its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
