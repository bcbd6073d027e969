"""Plug-ins: installed distributions that bring parts of ownloop. The one reader of their entry points.

An entry point of the group `ownloop.KIND` names a part by "module:attribute"; docs/extend.md says what each kind is.
A part that somebody names is found by `find`, which raises where it is broken. The parts that every run looks at are
found by `load_all`, which leaves a broken one out with a warning.
"""

import functools
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any, TypeVar, cast, get_args, get_origin

T = TypeVar("T")

KINDS = ("commands", "engines", "families", "algorithms", "observers", "generators", "hosts", "transports")
"""The groups of entry points, each without its `ownloop.`."""

OURS: Mapping[str, Mapping[str, str]] = {
    "agents": {"generators": "agents", "recipes": "agent_qwen3_gpu agent_smollm2_cpu"},
    "bitwise": {"engines": "bitwise", "generators": "bitwise", "observers": "bitwise"},
    "doctors": {"commands": "check-engine check-env compare model parity sweep"},
    "families": {
        "families": "DeepseekV3ForCausalLM Gemma4ForCausalLM Glm4MoeForCausalLM GptOssForCausalLM Qwen3MoeForCausalLM"
        " Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM"
    },
    "hosts": {
        "commands": "certs doctor hosts worker",
        "hosts": "kubernetes slurm ssh workers",
        "transports": "nccl network",
    },
    "instruments": {"commands": "bisect capsule regrade"},
    "mcp": {"commands": "mcp"},
    "megatron": {"engines": "fsdp1 megatron megatron_fsdp"},
    "plan": {"commands": "plan"},
    "referee": {"commands": "check-tinker"},
    "report": {"commands": "report", "observers": "curves opentelemetry report tensorboard trackio wandb"},
    "sandbox": {},
    "server": {"commands": "export-tinker key serve", "generators": "openai"},
    "shelf": {
        "advantages": "max_rl optimal_baseline pass_at_k",
        "losses": "clip_cov dppo_kl dppo_tv forward_kl gmpo jensen_shannon kimi_k25 kl_cov luspo m2po reverse_kl sapo"
        " vespo",
        "recipes": "distill_qwen3_gpu distill_smollm2_cpu self_distill_smollm2_cpu",
    },
    "speculation": {"commands": "drafts", "generators": "history ngram"},
    "tasks": {
        "recipes": "calculator_grpo_qwen3_gpu code_grpo_qwen3_5_gpu gsm8k_grpo_async_qwen2_5_gpu gsm8k_grpo_qwen3_gpu"
        " gsm8k_ppo_qwen2_5_gpu guess_grpo_smollm2_cpu guess_grpo_smollm2_gpu math_grpo_qwen2_5_gpu"
        " math_grpo_smollm2_cpu mixture_grpo_smollm2_cpu reward_smollm2_cpu tool_grpo_smollm2_cpu tool_grpo_smollm2_gpu"
    },
    "vision": {
        "families": "Gemma3ForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration",
        "recipes": "guess_colour_grpo_tinyvl_cpu guess_colour_sft_tinyvl_cpu",
    },
}
"""Plug-in -> what users name -> the names that it brings. So a name is explained where the plug-in is not installed."""


def find(kind: str, name: str, wanted: type[T]) -> T | None:
    """The part of this kind and name; None if no installed plug-in has it.

    `wanted` is the part's class, or `type[X]` for a part that is itself a subclass of X. Raises ValueError, naming the
    plug-in and the cause, for a part that cannot be loaded or is something else.
    """
    entry = _entry(kind, name, tuple(sys.path))
    if entry is None:
        _entry.cache_clear()  # it may be installed by the next try
        return None
    return load(entry, wanted)


@functools.cache
def _entry(kind: str, name: str, _path: tuple[str, ...]) -> EntryPoint | None:
    return next(iter(entry_points(group=f"ownloop.{kind}", name=name)), None)


def load_all(kind: str, wanted: type[T]) -> dict[str, T]:
    """Name -> part, of all parts of this kind. A broken one is left out, and warned of once."""
    return cast("dict[str, T]", {**_load_all(kind, wanted, tuple(sys.path))})


_broken: dict[str, str] = {}
"""Distribution -> what is wrong with a part of it that was left out."""


@functools.cache  # a search of the whole path takes milliseconds, and a plan asks a thousand times
def _load_all(kind: str, wanted: Any, _path: tuple[str, ...]) -> Mapping[str, object]:
    parts: dict[str, object] = {}
    for entry in sorted(entry_points(group=f"ownloop.{kind}")):
        try:
            parts[entry.name] = load(entry, wanted)
        except ValueError as error:
            warnings.warn(f"{error}; it is left out", stacklevel=2)
            if entry.dist is not None:
                _broken[entry.dist.name] = str(error)
    return parts


def load(entry: EntryPoint, wanted: type[T]) -> T:
    """The part that an entry point names. Raises ValueError as `find` does."""
    try:
        part: object = entry.load()
    except (Exception, SystemExit) as error:  # a module may end the program that imports it
        raise ValueError(f"{_broken_entry(entry)} cannot be loaded: {type(error).__name__}: {error}") from error
    (base,) = get_args(wanted) if get_origin(wanted) is type else (None,)
    if not (isinstance(part, wanted) if base is None else isinstance(part, type) and issubclass(part, base)):
        needed = f"an instance of {wanted.__name__}" if base is None else f"a subclass of {base.__name__}"
        raise ValueError(f"{_broken_entry(entry)} is {part!r:.200}; {needed} is needed")
    return cast("T", part)


def _broken_entry(entry: EntryPoint) -> str:
    owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "without a name"
    return f"the plug-in {owner} is broken: its entry {entry.name!r} of {entry.group} ({entry.value})"


def named_by(kind: str) -> dict[str, str]:
    """Name -> "module:attribute", of all parts of this kind. Loads none."""
    return {entry.name: entry.value for entry in entry_points(group=f"ownloop.{kind}")}


def owner_of(kind: str, name: str) -> str:
    """The installed distribution that has this entry point; empty if none has."""
    found = _entry(kind, name, tuple(sys.path))
    return found.dist.name if found is not None and found.dist is not None else ""


def why_absent(kind: str, name: str) -> str:
    """Where one of our plug-ins has this name and did not bring it: which, and what helps; empty for other names.

    `kind` is that of `OURS`.
    """
    plugin = next((each for each, names in OURS.items() if name in names.get(kind, "").split()), None)
    if plugin is None:
        return ""
    if not is_installed(f"ownloop-{plugin}"):
        clear()  # in a notebook, the next try sees what was installed meanwhile
        return f"the plug-in ownloop-{plugin} has it and is not installed: {how_to_install(f'ownloop-{plugin}')}"
    return _broken.get(f"ownloop-{plugin}", "")


def clear() -> None:
    """Forgets which parts there are."""
    _load_all.cache_clear()
    installed.cache_clear()
    _entry.cache_clear()
    _broken.clear()


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed distribution that is named `ownloop-...` or has an entry point of ownloop."""

    name: str
    version: str
    entries: tuple[EntryPoint, ...]
    """In the order of their names, by kind."""


@functools.cache
def installed() -> tuple[Plugin, ...]:
    """The installed plug-ins, sorted by name."""
    found: dict[str, Plugin] = {}
    for each in distributions():
        entries = tuple(sorted(e for e in each.entry_points if e.group.removeprefix("ownloop.") in KINDS))
        if entries or "\nName: ownloop-" in (each.read_text("METADATA") or ""):  # `name` parses whole pages
            found.setdefault(each.name, Plugin(each.name, each.version, entries))  # the first is what Python imports
    return tuple(found[name] for name in sorted(found))


def is_installed(distribution: str) -> bool:
    """Whether a distribution of this name is installed."""
    return any(distributions(name=distribution))


def why_not_imported(error: BaseException) -> str:
    """What an import that failed says; for a module of one of our plug-ins, how to install that."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    distribution = package.replace("_", "-")
    if distribution.removeprefix("ownloop-") in OURS and not is_installed(distribution):
        return f"it needs the plug-in {distribution}, which is not installed: {how_to_install(distribution)}"
    return f"{type(error).__name__}: {error}"


def how_to_install(distribution: str) -> str:
    """The commands that install a distribution: one for an environment with `pip`, one for a checkout of ownloop."""
    return f"`pip install {distribution}`, or `make setup` in a checkout of ownloop"
