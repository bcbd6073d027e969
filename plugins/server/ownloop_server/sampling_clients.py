"""Sampling clients: each samples from one policy, and answers many requests at the same time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from ownloop_server.answers import ONE_WRITER, PendingAnswer, ResponseBody, answer
from ownloop_server.image_chunks import image_tokens
from ownloop_server.served_models import ServedModel
from ownloop_server.wire import csr_rows
from rl.images import images_of, join_tokens
from rl.lora import Policy
from rl.sampling import MAX_TOPK_LOGPROBS
from rl.types import Completion, SamplingParams

MAX_SAMPLES = 1024
"""Completions of one request."""
MAX_PER_SESSION = 1000
"""Sampling clients that a session may have. The next one takes the place of the oldest whose weights are not kept."""
MAX_TARGET_TOKENS = 2**17
"""Tokens that may be computed for the `target_prompt_logprobs` of one request."""
_UNSUPPORTED = ("topk_sample_logprobs", "prompt_alt_tokens_k")
_SCORE = SamplingParams(max_tokens=1, prompt_logprobs=True)
_NO_LOGPROB = -99999.0
"""What the SDK takes for a position without log-probs of its most probable tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampling client's side of the server."""

    id: str
    """`<session>:sample:<n>`."""
    model: ServedModel
    base_model: str
    """The name by which the client asked for the model."""
    policy: Policy
    """The policy to sample from; None is the base model."""
    path: str | None
    """The checkpoint that it was made of, if it was one."""
    follows: str = ""
    """The training client whose in-flight saves it samples from; empty for weights that stay."""


class SamplingClients:
    """All sampling clients of all sessions."""

    def __init__(self) -> None:
        """None at first."""
        self._samplers: dict[str, Sampler] = {}
        self._tasks: dict[str, tuple[PendingAnswer, asyncio.Task[None]]] = {}
        self.num_running = 0
        """Requests that are being sampled."""

    def __len__(self) -> int:
        return len(self._samplers)

    def find(self, sampler_id: str) -> Sampler | None:
        """The sampling client with this id, if it is known."""
        return self._samplers.get(sampler_id)

    def missing(self, sampler_id: str | None) -> str:
        """Why there is none with this id."""
        return f"sampling client {sampler_id} has ended, or never was; a session keeps its newest {MAX_PER_SESSION}"

    def of_session(self, session_id: str) -> list[str]:
        """The ids of a session's clients."""
        return [sampler_id for sampler_id in self._samplers if sampler_id.startswith(f"{session_id}:sample:")]

    def add(
        self,
        session_id: str,
        number: int,
        model: ServedModel,
        base_model: str,
        policy: Policy,
        path: str | None = None,
        *,
        follows: str = "",
    ) -> Sampler:
        """Makes one. Those that follow the same training client sample from the same policy as it from now on.

        Raises ValueError if the session has one with this number.
        """
        if (sampler_id := f"{session_id}:sample:{number}") in self._samplers:
            raise ValueError(f"there is a sampling client {sampler_id}; {ONE_WRITER}")
        for known in [known for known in self._samplers.values() if follows and known.follows == follows]:
            self._samplers[known.id] = replace(known, policy=policy)
        of_session = self.of_session(session_id)
        if len(of_session) >= MAX_PER_SESSION:
            del self._samplers[next(filter(self._is_useless, of_session), of_session[0])]
        sampler = Sampler(id=sampler_id, model=model, base_model=base_model, policy=policy, path=path, follows=follows)
        self._samplers[sampler_id] = sampler
        return sampler

    def _is_useless(self, sampler_id: str) -> bool:
        sampler = self._samplers[sampler_id]
        return sampler.policy is not None and sampler.policy not in sampler.model.snapshots

    def forget_session(self, session_id: str) -> set[tuple[ServedModel, Policy]]:
        """Ends a session's clients. Returns the policies that no client samples from any more, with their models."""
        ended = [self._samplers.pop(sampler_id) for sampler_id in self.of_session(session_id)]
        used = {(sampler.model, sampler.policy) for sampler in self._samplers.values()}
        given_up: set[tuple[ServedModel, Policy]] = {(sampler.model, sampler.policy) for sampler in ended} - used
        return given_up

    def begin(self, sampler: Sampler, request: types.SampleRequest, pending: PendingAnswer) -> None:
        """Begins to answer a request. The result, or why there is none, goes to `pending`."""

        async def run() -> None:
            pending.set(await answer(lambda: self.sample(sampler, request)))

        def ended(_: object) -> None:
            del self._tasks[pending.id]
            # The first answer counts, so this is for a request that has none.
            pending.set(ResponseBody.failure(ValueError("the request was cancelled, or its session has ended")))

        task = asyncio.create_task(run())
        self._tasks[pending.id] = pending, task
        task.add_done_callback(ended)

    def cancel(self, request_id: str) -> None:
        """Stops to sample for a request, if it is one that samples."""
        if request_id in self._tasks:
            self._tasks[request_id][1].cancel()

    async def cancel_session(self, session_id: str) -> None:
        """Stops to sample for all requests of a session, and returns when none is sampled any more."""
        tasks = [task for pending, task in self._tasks.values() if pending.owner == session_id]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sample(self, sampler: Sampler, request: types.SampleRequest) -> ResponseBody:
        """Answers one request. Raises ValueError for what cannot be sampled."""
        prompt, sampling = read_request(request, sampler.model)
        targets = read_targets(request, prompt, sampler.model)
        generate = sampler.model.generator.generate
        self.num_running += 1
        try:
            async with sampler.model.snapshots.use(sampler.policy):
                completions, *scored = await asyncio.gather(
                    generate(prompt, sampling, request.num_samples, policy=sampler.policy),
                    *(generate(text, _SCORE, policy=sampler.policy) for text in targets.texts),
                )
        finally:
            self.num_running -= 1
        sampler.model.throughput.add("sampled", sum(len(completion.tokens) for completion in completions))
        response = encode_completions(completions, request)
        if (asked := request.target_prompt_logprobs) is not None:
            response.target_prompt_logprobs.CopyFrom(_encode_targets(asked, targets.logprobs(scored)))
        return ResponseBody.protobuf(response.SerializeToString())


def read_request(request: types.SampleRequest, model: ServedModel) -> tuple[tuple[int, ...], SamplingParams]:
    """The prompt's tokens and how to sample. Raises ValueError naming what is not supported."""
    for name in _UNSUPPORTED:
        if getattr(request, name):
            raise ValueError(
                f"{name} is not supported; prompt_logprobs, topk_prompt_logprobs and target_prompt_logprobs are"
            )
    prompt = _read_prompt(request.prompt, model)
    if images_of(prompt) and request.target_prompt_logprobs is not None:
        raise ValueError("target_prompt_logprobs is not supported for prompts with images; prompt_logprobs is")
    for token in prompt:
        if not 0 <= token < model.vocab_size:
            raise ValueError(f"the prompt has the token {token}; token ids are from 0 to {model.vocab_size - 1}")
    if request.topk_prompt_logprobs < 0:  # -1 would ask for all tokens, for which the protocol has no place
        asked = request.topk_prompt_logprobs
        raise ValueError(f"topk_prompt_logprobs is {asked}; it must be from 0 to {MAX_TOPK_LOGPROBS}")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n < len(prompt)):
        raise ValueError(
            f"prompt_logprobs_last_n is {last_n}; it needs prompt_logprobs, and must be from 1 to {len(prompt) - 1}"
        )
    params = request.sampling_params
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise ValueError(f"num_samples is {request.num_samples}; it must be from 1 to {MAX_SAMPLES}")
    max_tokens = _read_max_tokens(request, len(prompt), model)
    strings, tokens = _read_stop(params.stop)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop=strings,
        stop_token_ids=tokens,
        # an empty list of stops: the SDK's way to sample past the end
        ignore_eos=params.stop is not None and len(params.stop) == 0,
        seed=params.seed,
        prompt_logprobs=_scores_all(request),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
    )
    return prompt, sampling


def _read_prompt(given: types.ModelInput, model: ServedModel) -> tuple[int, ...]:
    """The tokens of all chunks, which know their images."""
    parts: list[Sequence[int]] = []
    for chunk in given.chunks:
        if isinstance(chunk, types.EncodedTextChunk):
            parts.append(chunk.tokens)
        elif isinstance(chunk, types.ImageChunk | types.ImageAssetPointerChunk) and model.read_image is not None:
            image = chunk.data if isinstance(chunk, types.ImageChunk) else chunk.location
            parts.append(image_tokens("prompt", image, chunk.expected_tokens, model.read_image))
        else:
            kinds = "text only" if model.read_image is None else "text and images"
            raise ValueError(
                f"the prompt has a chunk of kind {chunk.type}; this server samples from {kinds}: leave it out"
            )
    return join_tokens(*parts)


def _scores_all(request: types.SampleRequest) -> bool:
    """Whether the generator has to score the prompt's own tokens; a prompt that fills the context is only scored."""
    return bool(request.prompt_logprobs) or request.target_prompt_logprobs is not None


def _read_max_tokens(request: types.SampleRequest, num_prompt_tokens: int, model: ServedModel) -> int:
    """The tokens to sample. Raises ValueError for more than the context has room for.

    A prompt that fills the context can be scored: with `max_tokens` 1, as `compute_logprobs` sends it, or None.
    """
    max_tokens, room = request.sampling_params.max_tokens, model.max_context - num_prompt_tokens
    if room == 0 and (_scores_all(request) or request.topk_prompt_logprobs):
        room = 1  # vLLM samples one token with every prompt that it scores
    if room < (1 if max_tokens is None else max_tokens):
        wanted = "" if max_tokens is None or room < 0 else f" and max_tokens is {max_tokens}"
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens{wanted}; the context holds {model.max_context}, which "
            "`ownloop serve --generator.max-model-len` sets"
        )
    return room if max_tokens is None else max_tokens


@dataclass(frozen=True, slots=True)
class Targets:
    """The texts to score for `target_prompt_logprobs`: each is a beginning of the prompt and an id after it.

    An id that the prompt itself has there is scored with the whole prompt.
    """

    cells: tuple[tuple[int, int] | None, ...] = ()
    """For each cell that was sent, the indices of its text and of its log-prob there; None if it asks for nothing."""
    texts: tuple[tuple[int, ...], ...] = ()

    def logprobs(self, scored: Sequence[Sequence[Completion]]) -> NDArray[np.float32]:
        """One for each cell, 0 where it asks for nothing. `scored` has the completions of each text."""
        values = np.zeros(len(self.cells), np.float32)
        for index, cell in enumerate(self.cells):
            if cell is not None:
                of_text = scored[cell[0]][0].prompt_logprobs
                assert of_text is not None, "they were asked for"
                values[index] = of_text[cell[1]]
        return values


def read_targets(request: types.SampleRequest, prompt: Sequence[int], model: ServedModel) -> Targets:
    """What `target_prompt_logprobs` asks for. Raises ValueError for ids of other positions than the prompt's."""
    asked, name = request.target_prompt_logprobs, "target_prompt_logprobs"
    if asked is None:
        return Targets()
    shape = asked.shape or []
    # row r belongs to token r + 1: the first has no log-prob
    if asked.dtype != "int64" or len(shape) != 2 or shape[0] != len(prompt) - 1:
        raise ValueError(
            f"{name} is {asked.dtype} of shape {shape}; it must be int64 of shape [{len(prompt) - 1}, K], a row for "
            "every token of the prompt but the first"
        )
    if asked.sparse_crow_indices is None:
        if len(asked.data) != shape[0] * shape[1]:
            raise ValueError(f"{name} has {len(asked.data)} values and shape {shape}; they must agree")
        rows = np.repeat(np.arange(shape[0]), shape[1])
    else:
        try:
            starts, columns = (
                np.asarray(i or [], np.int64) for i in (asked.sparse_crow_indices, asked.sparse_col_indices)
            )
        except OverflowError:
            raise ValueError(f"{name} has indices that are no 64-bit integers") from None
        rows = csr_rows(name, starts, columns, len(asked.data), shape)
    texts: dict[tuple[int, int] | None, tuple[int, ...]] = {}  # by row and id; None is the whole prompt
    numbers: dict[tuple[int, int] | None, int] = {}
    cells: list[tuple[int, int] | None] = []
    num_tokens = 0
    for row, token in zip(rows.tolist(), asked.data, strict=True):
        if not isinstance(token, int) or not -1 <= token < model.vocab_size:
            raise ValueError(
                f"{name} has {token}; token ids are from 0 to {model.vocab_size - 1}, and -1 asks for nothing"
            )
        key = None if token == prompt[row + 1] else (row, token)
        if token >= 0 and key not in texts:
            texts[key] = tuple(prompt) if key is None else (*prompt[: row + 1], token)
            numbers[key] = len(numbers)
            num_tokens += len(texts[key])
        if num_tokens > MAX_TARGET_TOKENS:
            raise ValueError(
                f"{name} has {len(asked.data)} cells for a prompt of {len(prompt)} tokens; every id is computed with "
                f"the tokens before it, at most {MAX_TARGET_TOKENS} tokens in all: ask for fewer ids at a time"
            )
        cells.append((numbers[key], row) if token >= 0 else None)
    return Targets(tuple(cells), tuple(texts.values()))


def _encode_targets(asked: Any, logprobs: NDArray[np.float32]) -> messages.Tensor:
    """A tensor of the request's shape and layout."""
    tensor = messages.Tensor(dtype=messages.DTYPE_FLOAT32, shape=asked.shape)
    if asked.sparse_crow_indices is None:
        tensor.dense = logprobs.tobytes()
    else:
        tensor.sparse_csr.values = logprobs.tobytes()
        tensor.sparse_csr.crow_indices = np.asarray(asked.sparse_crow_indices, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.asarray(asked.sparse_col_indices, np.int64).tobytes()
    return tensor


def _read_stop(stop: object) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings and stop tokens."""
    if stop is None:
        return (), ()
    if isinstance(stop, str):
        return ((stop,) if stop else ()), ()
    assert isinstance(stop, list | tuple), "the request's own type holds nothing else"
    entries: tuple[str | int, ...] = tuple(stop)
    return tuple(s for s in entries if isinstance(s, str)), tuple(t for t in entries if isinstance(t, int))


def encode_completions(completions: list[Completion], request: types.SampleRequest) -> messages.SampleResponse:
    """A `SampleResponse`. Positions of the prompt that have no log-prob, the first among them, are NaN."""
    last_n = request.prompt_logprobs_last_n
    response = messages.SampleResponse()
    for completion in completions:
        # the SDK knows no other reason
        reason = messages.STOP_REASON_STOP if completion.finish_reason == "stop" else messages.STOP_REASON_LENGTH
        response.sequences.add(
            stop_reason=reason,
            tokens=np.asarray(completion.tokens, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
    if (topk := completions[0].topk_prompt_logprobs) and request.topk_prompt_logprobs:
        response.topk_prompt_logprobs.CopyFrom(_encode_topk(topk, last_n))
    if request.prompt_logprobs and (scored := completions[0].prompt_logprobs) is not None:
        logprobs = np.asarray([np.nan, *scored], np.float32)
        if last_n is not None:
            logprobs[: len(logprobs) - last_n] = np.nan
        response.prompt_logprobs = logprobs.tobytes()
    return response


def _encode_topk(rows: Sequence[Sequence[tuple[int, float]]], last_n: int | None) -> messages.TopkLogprobs:
    """The most probable tokens, [P - 1, K], of all positions of a prompt but the first; of the last `last_n` only."""
    array = np.asarray(rows)  # [P - 1, K, 2]; float64 holds every token id
    tokens = np.zeros((len(rows) + 1, array.shape[1]), np.int32)
    logprobs = np.full(tokens.shape, _NO_LOGPROB, np.float32)
    first = 1 if last_n is None else len(tokens) - last_n
    tokens[first:], logprobs[first:] = array[first - 1 :, :, 0], array[first - 1 :, :, 1]
    return messages.TopkLogprobs(
        token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=tokens.shape[1], length=len(tokens)
    )
