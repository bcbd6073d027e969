"""Groups of rollouts as the columns of a Parquet file, and back: exact, one row per rollout.

Tokens and versions are int32 and log-probs float32, which is what a generator computes. Text stays readable: the
problem's `prompt`, and of every turn the environment's `prompt` and the model's `text`. A group without rollouts,
because all of them failed, has no row and does not come back. Of rollouts with images there is one more column: each
image's file is in the first row that has it, and only its hash in others. What a model reads of it is not recorded.
"""

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike

from rl.images import PlacedImage, TokensWithImages, images_of
from rl.sampling import KeptSets, Routes
from rl.types import Completion, Group, Rollout, Turn

_TOKENS, _LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.float32())
_TURN = pa.struct(
    [
        ("prompt", pa.string()),
        ("prompt_tokens", _TOKENS),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("tokens", _TOKENS),
        ("logprobs", _LOGPROBS),
        ("versions", _TOKENS),
        ("temperature", pa.float64()),
        ("kept", pa.list_(_TOKENS)),
        ("routes", pa.large_binary()),
        ("routes_shape", _TOKENS),
        ("prompt_logprobs", _LOGPROBS),
    ]
)
SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("problem_id", pa.string()),
        ("prompt", pa.string()),
        ("reward", pa.float64()),
        ("truncated", pa.bool_()),
        ("out_of_context", pa.bool_()),
        ("environment_s", pa.float64()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("group_failures", pa.list_(pa.string())),
        ("turns", pa.list_(_TURN)),
    ]
)
"""The columns of every file: `group` and `sample` count from 0 within the file and within the group."""
_NUMBER, _IMAGES, _TEXT, _COUNT = "number", "images", pa.string(), pa.int32()
_IMAGE = pa.struct(
    [("turn", _COUNT), ("start", _COUNT), ("num_tokens", _COUNT), ("hash", _TEXT), ("file", pa.binary())]
)
_IN_TURN = "turns.list.element."
# Few different values; a dictionary of tokens or of unique texts would only take time.
_DICTIONARIES = ["step", "split", "group", "problem_id", "prompt", f"{_IN_TURN}versions.list.element"]
_LOGPROB_COLUMNS = [f"{_IN_TURN}{name}.list.element" for name in ("logprobs", "prompt_logprobs")]
_NUMBERS_AT_ONCE = 4096

T = TypeVar("T")


class _PlacedFile(TypedDict):
    """A row of `_IMAGE`: where an image stands, and its file where no earlier row has it."""

    turn: int
    start: int
    num_tokens: int
    hash: str
    file: bytes | None


def groups_to_table(groups: Sequence[Group]) -> pa.Table:
    """A table of `SCHEMA`. Takes some 0.1 us a token; other threads can run in between."""
    rows = [(index, sample, group, r) for index, group in enumerate(groups) for sample, r in enumerate(group.rollouts)]
    rollouts = [rollout for *_, rollout in rows]
    metrics = [rollout.metrics for rollout in rollouts]
    columns = {
        "group": pa.array([index for index, *_ in rows], pa.int32()),
        "sample": pa.array([sample for _, sample, *_ in rows], pa.int32()),
        "problem_id": _texts(group.problem_id for *_, group, _ in rows),
        "prompt": _texts(group.prompt for *_, group, _ in rows),
        "reward": pa.array([float(rollout.reward) for rollout in rollouts], pa.float64()),
        "truncated": pa.array([rollout.truncated for rollout in rollouts], pa.bool_()),
        "out_of_context": pa.array([rollout.out_of_context for rollout in rollouts], pa.bool_()),
        "environment_s": pa.array([float(rollout.environment_s) for rollout in rollouts], pa.float64()),
        "metrics": pa.MapArray.from_arrays(
            _offsets(metrics),
            _texts(name for values in metrics for name in values),
            pa.array([float(value) for values in metrics for value in values.values()], pa.float64()),
        ),
        "group_failures": pa.ListArray.from_arrays(
            _offsets([group.failures for *_, group, _ in rows]),
            _texts(failure for *_, group, _ in rows for failure in group.failures),
        ),
        "turns": pa.ListArray.from_arrays(
            _offsets([rollout.turns for rollout in rollouts]), _turns([t for r in rollouts for t in r.turns])
        ),
    }
    table = pa.table(columns, schema=SCHEMA)
    if any(group.number is not None for *_, group, _ in rows):
        table = table.append_column(_NUMBER, pa.array([group.number for *_, group, _ in rows], _COUNT))
    images = _images(rollouts)
    return table.append_column(_IMAGES, pa.array(images, pa.list_(_IMAGE))) if any(images) else table


def table_to_groups(table: pa.Table) -> list[Group]:
    """The groups that a table was made from, in order. Raises ValueError for a table without these columns."""
    missing = [name for name in SCHEMA.names if name not in table.column_names]
    of_turns = [] if missing else table.schema.field("turns").type.value_type.names
    missing += [f"turns.{field.name}" for field in _TURN if not missing and field.name not in of_turns]
    if missing:
        raise ValueError(f"it has no column {missing[0]!r}")
    images = table[_IMAGES].to_pylist() if _IMAGES in table.column_names else []
    numbers = table[_NUMBER].to_pylist() if _NUMBER in table.column_names else [None] * len(table)
    table = table.select(SCHEMA.names).cast(SCHEMA)
    turns = table["turns"].combine_chunks()
    offsets, played = turns.offsets.to_pylist(), _played(turns.values)
    _put_back(images, offsets, played)
    names = [name for name in SCHEMA.names if name not in ("turns", "truncated")]
    groups: dict[int, tuple[dict[str, Any], list[Rollout]]] = {}
    for place, row in enumerate(table.select(names).to_pylist()):
        _, rollouts = groups.setdefault(row["group"], ({**row, "number": numbers[place]}, []))
        rollouts.append(
            Rollout(
                turns=tuple(played[offsets[place] : offsets[place + 1]]),
                reward=row["reward"],
                metrics=dict(row["metrics"]),
                out_of_context=row["out_of_context"],
                environment_s=row["environment_s"],
            )
        )
    return [
        Group(
            problem_id=row["problem_id"],
            prompt=row["prompt"],
            rollouts=tuple(rollouts),
            failures=tuple(row["group_failures"]),
            number=row["number"],
        )
        for row, rollouts in groups.values()
    ]


def parquet_bytes(table: pa.Table) -> pa.Buffer:
    """A table as the contents of a Parquet file."""
    stream, write = pa.BufferOutputStream(), cast("Any", pq.write_table)  # its stubs know no lists of columns
    write(
        table,
        stream,
        compression="zstd",
        use_dictionary=[name for name in _DICTIONARIES if name.partition(".")[0] in table.column_names],
        use_byte_stream_split=_LOGPROB_COLUMNS,  # the bytes of a float compress better apart from each other
        write_statistics=["step", "split", "reward"],
    )
    return stream.getvalue()


def read_groups(file: Path) -> list[Group]:
    """The groups of a Parquet file. Raises ValueError naming the file if it cannot be read or is of something else."""
    return _read(file, lambda opened: table_to_groups(opened.read()))


def count_groups(file: Path) -> int:
    """The number of groups in a Parquet file; reads one small column. Raises ValueError like `read_groups`."""
    return _read(file, lambda opened: len(opened.read(columns=["group"])["group"].unique()))


def _read(file: Path, read: Callable[[pq.ParquetFile], T]) -> T:
    try:
        with pq.ParquetFile(file) as opened:
            return read(opened)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ValueError(f"the recording {file} cannot be read: {reason}") from None
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} is not a recording of rollouts: {error}") from None


def _turns(turns: Sequence[Turn]) -> pa.StructArray:
    completions = [turn.completion for turn in turns]
    of_prompts = [completion.prompt_logprobs for completion in completions]
    columns = {
        "prompt": _texts(turn.prompt for turn in turns),
        "prompt_tokens": _numbers([turn.prompt_tokens for turn in turns], np.int32),
        "text": _texts(completion.text for completion in completions),
        "finish_reason": _texts(completion.finish_reason for completion in completions),
        "tokens": _numbers([completion.tokens for completion in completions], np.int32),
        "logprobs": _numbers([completion.logprobs for completion in completions], np.float32),
        "versions": _numbers([completion.versions for completion in completions], np.int32),
        "temperature": pa.array([float(completion.temperature) for completion in completions], pa.float64()),
        "kept": _sets([completion.kept for completion in completions]),
        "routes": pa.array([_bytes(completion.routes) for completion in completions], pa.large_binary()),
        "routes_shape": _numbers([_shape(completion.routes) for completion in completions], np.int32),
        "prompt_logprobs": _numbers(of_prompts, np.float32),
    }
    return pa.StructArray.from_arrays([columns[field.name] for field in _TURN], fields=list(_TURN))


def _played(turns: pa.StructArray) -> list[Turn]:
    values = zip(
        *(turns.field(name).to_pylist() for name in ("prompt", "text", "finish_reason", "temperature")), strict=True
    )
    names = ("prompt_tokens", "tokens", "logprobs", "versions", "prompt_logprobs")
    arrays = _kept(turns.field("kept")), _routes(turns.field("routes"), turns.field("routes_shape"))
    numbers = zip(*(_tuples(turns.field(name)) for name in names), *arrays, strict=True)
    return [
        Turn(
            prompt_tokens=prompt_tokens or (),
            completion=Completion(
                tokens=tokens or (),
                logprobs=logprobs or (),
                versions=versions or (),
                text=text,
                finish_reason=reason,
                temperature=temperature,
                kept=kept,
                routes=routes,
                prompt_logprobs=of_prompt,
            ),
            prompt=prompt,
        )
        for (prompt, text, reason, temperature), (
            prompt_tokens,
            tokens,
            logprobs,
            versions,
            of_prompt,
            kept,
            routes,
        ) in zip(values, numbers, strict=True)
    ]


def _images(rollouts: Sequence[Rollout]) -> list[list[_PlacedFile]]:
    """The images of each rollout; each file once."""
    known: set[str] = set()
    rows: list[list[_PlacedFile]] = []
    for rollout in rollouts:
        rows.append([])
        for number, turn in enumerate(rollout.turns):
            for image in images_of(turn.prompt_tokens):
                key = hashlib.sha256(image.data).hexdigest()
                file = None if key in known else image.data
                rows[-1].append(
                    {"turn": number, "start": image.start, "num_tokens": image.num_tokens, "hash": key, "file": file}
                )
                known.add(key)
    return rows


def _put_back(rows: Sequence[Sequence[_PlacedFile]], offsets: Sequence[int], played: list[Turn]) -> None:
    """`_images` backwards: gives the turns their images, without what a model reads of them."""
    files = {each["hash"]: each["file"] for row in rows for each in row if each["file"] is not None}
    for row, first in zip(rows, offsets, strict=False):
        for number, of_turn in itertools.groupby(row, lambda each: each["turn"]):
            images = [
                PlacedImage(start=each["start"], num_tokens=each["num_tokens"], data=files[each["hash"]], inputs={})
                for each in of_turn
            ]
            turn = played[first + number]
            tokens = TokensWithImages(turn.prompt_tokens, images)
            played[first + number] = replace(turn, prompt_tokens=tokens)


def _numbers(sequences: Sequence[Sequence[float] | None], dtype: DTypeLike) -> pa.ListArray:
    """One list per sequence, null for None."""
    parts, since = [np.empty(0, dtype)], 0
    for sequence in sequences:
        if sequence is None:
            continue
        size = len(sequence)
        # Mostly all versions of a completion are one. To count is ten times as fast as to convert.
        same = size > 1 and sequence[0] == sequence[1] and sequence.count(sequence[0]) == size
        parts.append(np.full(size, sequence[0], dtype) if same else np.fromiter(sequence, dtype, size))
        since += size
        if since >= _NUMBERS_AT_ONCE:
            since = 0
            time.sleep(1e-4)  # NumPy holds the interpreter's lock, for which the event loop's thread may be waiting
    absent = pa.array([sequence is None for sequence in sequences], pa.bool_())
    return pa.ListArray.from_arrays(
        _offsets([s or () for s in sequences]), pa.array(np.concatenate(parts)), mask=absent
    )


def _sets(of_turns: Sequence[KeptSets | None]) -> pa.ListArray:
    """One list of sets per turn, null for None."""
    there = KeptSets.joined([KeptSets.whole(0), *(kept for kept in of_turns if kept is not None)])
    sets = pa.ListArray.from_arrays(
        pa.array(there.starts.astype(np.int32)), pa.array(there.ids.astype(np.int32)), type=_TOKENS
    )
    absent = pa.array([kept is None for kept in of_turns], pa.bool_())
    return pa.ListArray.from_arrays(_offsets([kept or () for kept in of_turns]), sets, mask=absent)


def _kept(lists: pa.ListArray) -> list[KeptSets | None]:
    """`_sets` backwards."""
    sets, offsets, valid = lists.values, lists.offsets.to_pylist(), lists.is_valid().to_pylist()
    ids = sets.values.to_numpy(zero_copy_only=False)
    every = KeptSets(ids, sets.offsets.to_numpy().astype(np.int64))
    parts = (every.part(start, stop) for start, stop in itertools.pairwise(offsets))
    return [kept.compact() if there else None for kept, there in zip(parts, valid, strict=True)]


def _bytes(routes: Routes | None) -> bytes | None:
    return None if routes is None else routes.prompt.tobytes() + routes.sampled.tobytes()


def _shape(routes: Routes | None) -> tuple[int, ...] | None:
    """Tokens of the prompt, and sampled ones; layers, experts of a token, bytes of an expert."""
    return None if routes is None else (len(routes.prompt), *routes.sampled.shape, routes.sampled.itemsize)


def _routes(every: pa.LargeBinaryArray, shapes: pa.ListArray) -> list[Routes | None]:
    """What `_bytes` and `_shape` were made of."""
    found: list[Routes | None] = []
    for experts, shape in zip(every.to_pylist(), _tuples(shapes), strict=True):
        if shape is None:
            found.append(None)
            continue
        num_prompt, _, *layers, itemsize = shape
        ids = np.frombuffer(experts, np.uint8 if itemsize == 1 else np.uint16).reshape(-1, *layers)
        found.append(Routes(ids[:num_prompt], ids[num_prompt:]))
    return found


def _tuples(lists: pa.ListArray) -> list[tuple[object, ...] | None]:
    """One tuple of Python numbers per list, None for null."""
    values, offsets = lists.values.to_numpy(zero_copy_only=False), lists.offsets.to_pylist()
    valid = lists.is_valid().to_pylist()
    return [
        tuple(values[start:end].tolist()) if there else None
        for start, end, there in zip(offsets[:-1], offsets[1:], valid, strict=True)
    ]


def _offsets(sequences: Sequence[Sized]) -> pa.Array:
    """[len(sequences) + 1] where each sequence begins when all are laid end to end."""
    return pa.array(np.cumsum([0, *(len(sequence) for sequence in sequences)], dtype=np.int32))


def _texts(values: Iterable[str]) -> pa.StringArray:
    """Half of a surrogate pair, which UTF-8 cannot hold, becomes its escape."""
    texts = list(values)
    try:
        return cast("pa.StringArray", pa.array(texts, pa.string()))
    except UnicodeEncodeError:
        safe = [text.encode("utf-8", "backslashreplace").decode() for text in texts]
        return cast("pa.StringArray", pa.array(safe, pa.string()))
