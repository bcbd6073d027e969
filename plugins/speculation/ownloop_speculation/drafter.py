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
from ownloop_speculation.rule import DraftRule
from ownloop_speculation.sampler import ExactSampler


class Drafter:
    """Follows the requests of one rank, and proposes drafts for the next step."""

    def __init__(self, vllm_config: Any) -> None:
        """As vLLM makes it. `attach` does the rest, once there is an engine."""

    def load_model(self, model: Any) -> None:
        """Nothing to load; vLLM's runner for CPUs calls it."""

    def attach(self, engine: LLMEngine, speculation: Speculation, history: History) -> None:
        """Has the engine sample exactly, and follows its runner. Call it before the first request."""
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
        self._started = self._overhead = self._looked = 0.0
        # vLLM leaves min-p and token biases out where there are drafts, and refuses requests that ask for them.
        runner.input_batch.logitsprocs = LogitsProcessors(
            each(engine.vllm_config, runner.device, False) for each in BUILTIN_LOGITS_PROCESSORS
        )
        engine.input_processor.speculative_config = None
        # Drafts end at the context's end by themselves. vLLM would replace all drafts of a step by token 0 near it.
        runner.effective_drafter_max_model_len = 1 << 62
        # Requests whose prompts are cached would begin with as many drafts of nothing.
        core.engine_core.scheduler.num_spec_tokens = 0
        self._execute_model, runner.execute_model = runner.execute_model, self._timed

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
        }

    def propose(
        self, sampled: list[list[int]], num_tokens: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """A draft for each request of the batch, which may be empty. `sampled` are the step's tokens."""
        del slot_mappings
        began = time.thread_time()
        self._count(sampled, began)
        self._follow(sampled, num_tokens, token_ids)
        drafts: list[list[int]] = [[] for _ in sampled]
        if self.rule.is_worth_a_look(len(sampled)):
            looked = time.thread_time()
            drafts = self._drafts(num_tokens)
            self._looked = time.thread_time() - looked
        if self._group.world_size > 1:  # the clock is rank 0's
            drafts = cast("list[list[int]]", self._group.broadcast_object(drafts))
        self._overhead = time.thread_time() - began
        return drafts

    def _timed(self, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        self._started = time.thread_time()
        self._scheduled = scheduler_output
        return self._execute_model(scheduler_output, *args, **options)

    def _count(self, sampled: Sequence[Sequence[int]], now: float) -> None:
        """Learns from a step what it cost and saved."""
        drafted = sum(map(len, self._scheduled.scheduled_spec_decode_tokens.values()))
        running, rows = len(sampled), self._scheduled.total_num_scheduled_tokens
        num_tokens = sum(map(len, sampled))
        if rows == running + drafted:  # no prompts
            self.rule.observe_step(rows, now - self._started, checks=drafted > 0)
        accepted = num_tokens - running
        saved = self.rule.gain(running, accepted, drafted) if drafted else 0.0
        if self._looked:
            self.rule.observe_look(running, saved, self._looked)
        values = (running, num_tokens, drafted, accepted, saved - self._overhead)
        counts = self._metrics  # which another thread may take
        for name, value in zip(counts, values, strict=True):
            counts[name] += value
        self._looked = self._overhead = 0.0

    def _follow(self, sampled: Sequence[Sequence[int]], num_tokens: Any, token_ids: Any) -> None:
        """Tells the history what was sampled."""
        batch, history = self._runner.input_batch, self.history
        version = int(self._core.get_weight_version())
        for request in history.running.difference(batch.req_ids):
            history.end(request)
            self._can_draft.pop(request, None)
        for row, (request, new) in enumerate(zip(batch.req_ids, sampled, strict=True)):
            if request in self._can_draft:
                history.extend(request, new, version)
                continue
            num_prompt = int(batch.num_prompt_tokens[row])
            history.begin(request, token_ids[row, :num_prompt])
            history.extend(request, token_ids[row, num_prompt : int(num_tokens[row])].tolist(), version)
            self._can_draft[request] = _can_draft(self._runner.requests[request].sampling_params)

    def _drafts(self, num_tokens: Any) -> list[list[int]]:
        batch, running = self._runner.input_batch, len(self._runner.input_batch.req_ids)
        least = max(self._speculation.min_chance, self.rule.least_chance(running))
        drafts: list[list[int]] = []
        expected, room = 0.0, self._runner.max_num_tokens - running
        for row, request in enumerate(batch.req_ids):
            most = min(self._most(request, int(num_tokens[row])), room) if least < 1 else 0
            draft = self.history.draft(request, most, least)
            expected += sum(draft.chances)
            room -= len(draft.tokens)
            drafts.append(draft.tokens)
        num_drafted = sum(map(len, drafts))
        return drafts if self.rule.gain(running, expected, num_drafted) > 0 else [[] for _ in drafts]

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
