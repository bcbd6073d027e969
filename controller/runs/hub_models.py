"""Models of the Hugging Face Hub: from `ORG/NAME[@revision]` to a directory of the hub's own cache.

`huggingface_hub` does the work, so its settings hold: HF_HOME (the cache), HF_TOKEN or `hf auth login`, HF_HUB_OFFLINE,
HF_ENDPOINT. Only configuration, tokenizer and safetensors are fetched, and the weights only once the configuration is
known to be of a model that can be trained.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.hf_config import check_architecture
from rl.model_files import INDEX_FILE, OTHER_PATTERNS, SINGLE_FILE, TEMPLATES_FOLDER, indexed_names

_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LEFT_OUT = ("*/*", INDEX_FILE, "trainer_state.json")  # files in folders: other formats of the same weights
_TOLD_EVERY = 0.1  # of a download


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
        """As the user writes it."""
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit, so that it always means the same files."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def fetch(model: HubName, tell: Callable[[str], None]) -> Path:
    """The directory of the model in the hub's cache; its name is the commit. Fetches what the cache lacks.

    Of an interrupted download, whole files are kept. `tell` is told how far it is. Raises ValueError, in one sentence,
    if there is no such model, if its terms must be accepted first, if it has no safetensors or an architecture that
    cannot be trained, and if neither the hub can be reached nor the cache has it.
    """
    directory = _download(model, OTHER_PATTERNS, tell, left_out=_LEFT_OUT)
    check_architecture(directory)
    pinned = HubName(repository=model.repository, revision=directory.name)
    _download(pinned, [SINGLE_FILE, f"{TEMPLATES_FOLDER}/*.jinja"], tell)
    weights = (SINGLE_FILE,)
    if not (directory / SINGLE_FILE).is_file():  # an index beside it would lead vLLM to other files
        _download(pinned, [INDEX_FILE], tell)
        if (directory / INDEX_FILE).is_file():
            try:
                weights = indexed_names(directory / INDEX_FILE)
            except ValueError as error:
                raise ValueError(f"model {model}: {error}") from None
            _download(pinned, weights, tell)
    if missing := [name for name in weights if not (directory / name).is_file()]:
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
        raise ValueError(
            f"model {model} is neither a directory here nor complete in the cache {constants.HF_HUB_CACHE}, and "
            f"{_why_not(error, constants.ENDPOINT)}; where there is a network, `hf download {model.repository} "
            f"--local-dir DIR` makes a directory to copy here and to name as the model"
        ) from None
    return Path(str(path))


def _why_not(error: BaseException, endpoint: str) -> str:
    """Why nothing could be fetched, in a few words."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return "HF_HUB_OFFLINE is set"
    system = next((cause for cause in causes if isinstance(cause, OSError) and cause.strerror), None)
    return f"{endpoint} cannot be reached ({_first_line(causes[-1]) if system is None else system.strerror})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _progress(model: HubName, tell: Callable[[str], None]) -> Any:
    """A progress bar that tells how much is fetched, now and then, in place of drawing itself."""
    from tqdm.std import tqdm

    class Progress(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        """The bar that `snapshot_download` updates; only the one that counts bytes on disk speaks."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._speaks = str(kwargs.get("desc", "")).startswith("Reconstructing")
            self._told = -1.0
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def display(self, *args: Any, **kwargs: Any) -> Any:
            """In place of drawing."""
            del args, kwargs
            total = self.total or 0
            if self._speaks and total > 1 << 20 and self.n / total >= self._told + _TOLD_EVERY:
                self._told = self.n / total
                tell(f"fetching {model.repository}: {self._told:.0%} of {total / 1e6:,.0f} MB")
            return True

    return Progress
