"""Drafts for the requests of a model runner, where they pay. vLLM's speculative method "custom_class" calls it."""

import time
from collections.abc import Sequence
from typing import Any, cast

from vllm.distributed.parallel_state import get_tp_group
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors

from generator.config import Speculation
from ownloop_speculation.history import History
from ownloop_speculation.rule import DraftRule, propose
from ownloop_speculation.sampler import ExactSampler


class Drafter:
    """Follows the requests of one rank, and proposes drafts for the next step."""

    def __init__(self, vllm_config: object) -> None:
        """As vLLM makes it. `attach` does the rest, once there is an engine."""

    def load_model(self, model: object) -> None:
        """Nothing to load; vLLM's runner for CPUs calls it."""

    def attach(self, engine: LLMEngine, speculation: Speculation, history: History) -> None:
        """Has the engine sample exactly, and follows its runner. Call it before the first request."""
        llm: Any = engine
        core: Any = engine.engine_core
        runner: Any = engine.model_executor.driver_worker.model_runner  # pyright: ignore[reportAttributeAccessIssue]
        if runner.model_config.is_hybrid:
            raise ValueError(f"Speculation: {runner.model_config.model} has recurrent layers, which is not proven")
        self.history, self.rule = history, DraftRule()
        self._speculation, self._runner, self._core = speculation, runner, core
        runner.rejection_sampler = ExactSampler(runner.sampler)
        self._group = get_tp_group()
        self._can_draft: dict[str, bool] = {}
        self._metrics = dict.fromkeys(("requests", "tokens", "drafted", "accepted", "saved"), 0.0)
        self._overhead = self._looked = 0.0
        self._logprobs: Any = None
        self._counted: tuple[int, int, int, int] | None = None
        # vLLM leaves min-p and token biases out where there are drafts, and refuses requests that ask for them.
        runner.input_batch.logitsprocs = LogitsProcessors(
            each(engine.vllm_config, runner.device, False) for each in BUILTIN_LOGITS_PROCESSORS
        )
        engine.input_processor.speculative_config = None
        # Drafts end at the context's end by themselves. vLLM would replace all drafts of a step by token 0 near it.
        runner.effective_drafter_max_model_len = 1 << 62
        # Requests whose prompts are cached would begin with as many drafts of nothing.
        core.engine_core.scheduler.num_spec_tokens = 0
        self._execute_model, runner.execute_model = runner.execute_model, self._scheduled_step
        self._sample, runner._sample = runner._sample, self._sample_and_keep
        self._step, llm.step = llm.step, self._timed_step

    def take_metrics(self) -> dict[str, float]:
        """See `EnginePart.take_metrics`. Empty without a step."""
        found, self._metrics = self._metrics, dict.fromkeys(self._metrics, 0.0)
        if not found["requests"]:
            return {}
        return {
            "engine_draft_tokens": found["drafted"],
            "engine_accepted_tokens": found["accepted"],
            "engine_tokens_per_step": found["tokens"] / found["requests"],
            "engine_draft_seconds_saved": found["saved"],
            **{f"engine_seconds_{name}": value for name, value in self.rule.costs().items()},
        }

    def propose(
        self, sampled: list[list[int]], num_tokens: object, token_ids: object, slot_mappings: object = None
    ) -> list[list[int]]:
        """A draft for each request of the batch, which may be empty. `sampled` are the step's tokens."""
        del slot_mappings
        began = time.thread_time()
        drafted = sum(map(len, self._scheduled.scheduled_spec_decode_tokens.values()))
        self._counted = len(sampled), self._scheduled.total_num_scheduled_tokens, drafted, sum(map(len, sampled))
        self._count_look()
        self._follow(sampled, num_tokens, token_ids)
        drafts: list[list[int]] = [[] for _ in sampled]
        if self.rule.is_worth_a_look(len(sampled)):
            drafts = self._drafts(num_tokens)
            self._looked = time.thread_time() - began
        if self._group.world_size > 1:  # the clock is rank 0's
            drafts = cast("list[list[int]]", self._group.broadcast_object(drafts))
        self._overhead = time.thread_time() - began
        return drafts

    def _scheduled_step(self, scheduler_output: Any, *args: object, **options: object) -> object:
        self._scheduled = scheduler_output
        return self._execute_model(scheduler_output, *args, **options)

    def _sample_and_keep(self, *args: object, **options: object) -> object:
        output = self._sample(*args, **options)
        found = output.logprobs_tensors
        shape = output.sampled_token_ids.shape
        self._logprobs = None if found is None else found.logprobs[:, 0].view(shape).tolist()
        return output

    def _timed_step(self) -> object:
        began = time.thread_time()
        outputs = self._step()
        if self._counted is not None:
            running, rows, drafted, num_tokens = self._counted
            seconds = time.thread_time() - began - self._overhead
            if of_prompts := rows - running - drafted:
                beyond = seconds - self.rule.seconds(running + drafted, checks=drafted > 0)
                self.rule.observe_prompts(of_prompts, beyond)
            else:
                self.rule.observe_step(rows, seconds, checks=drafted > 0)
            self.rule.observe_tokens(running, drafted, num_tokens)
            saved = self.rule.gain(running, num_tokens - running, drafted) if drafted else 0.0
            values = (running, num_tokens, drafted, num_tokens - running, saved - self._overhead)
            counts = self._metrics  # which another thread may take
            for name, value in zip(counts, values, strict=True):
                counts[name] += value
            self._counted, self._overhead = None, 0.0
        return outputs

    def _count_look(self) -> None:
        """Learns what the last look took and saved, now that its drafts were checked."""
        assert self._counted is not None
        running, _, drafted, num_tokens = self._counted
        if self._looked:
            saved = self.rule.gain(running, num_tokens - running, drafted) if drafted else 0.0
            self.rule.observe_look(running, saved, self._looked)
        self._looked = 0.0

    def _follow(self, sampled: Sequence[Sequence[int]], num_tokens: Any, token_ids: Any) -> None:
        """Tells the history what was sampled."""
        batch, history = self._runner.input_batch, self.history
        version = int(self._core.get_weight_version())
        for request in history.running.difference(batch.req_ids):
            history.end(request)
            self._can_draft.pop(request, None)
        for row, (request, new) in enumerate(zip(batch.req_ids, sampled, strict=True)):
            logprobs = None if self._logprobs is None else self._logprobs[row][: len(new)]
            if request in self._can_draft:
                history.extend(request, new, version, logprobs)
                continue
            num_prompt = int(batch.num_prompt_tokens[row])
            history.begin(request, token_ids[row, :num_prompt])
            sampled_before = token_ids[row, num_prompt : int(num_tokens[row]) - len(new)].tolist()
            history.extend(request, sampled_before, version)
            history.extend(request, new, version, logprobs)
            self._can_draft[request] = _can_draft(self._runner.requests[request].sampling_params)

    def _drafts(self, num_tokens: Any) -> list[list[int]]:
        requests = self._runner.input_batch.req_ids
        longest = {request: self._most(request, int(num_tokens[row])) for row, request in enumerate(requests)}
        room = self._runner.max_num_tokens - len(requests)
        return propose(self.history, self.rule, longest, self._speculation.min_chance, room)

    def _most(self, request: str, size: int) -> int:
        """The most tokens that a draft can have, of which vLLM samples one more."""
        if not self._can_draft[request]:
            return 0
        left = self._runner.requests[request].sampling_params.max_tokens - self.history.num_tokens(request)
        return max(0, min(self._speculation.max_draft, left - 1, self._runner.max_model_len - size - 1))


def _can_draft(params: SamplingParams) -> bool:
    """Whether each of a request's tokens has a distribution that no token before it changes but through the model."""
    return not (
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.bad_words
        or params.allowed_token_ids
        or params.logit_bias
        or params.min_tokens
        or params.logprob_token_ids
        or params.structured_outputs
        or params.thinking_token_budget is not None
    )
