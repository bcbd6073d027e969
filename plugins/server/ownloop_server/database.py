"""What survives a restart of the server: training runs and checkpoints, in an SQLite file in the server's folder."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, ForeignKey, create_engine, event, select
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column, sessionmaker

from rl.lora import LoRAConfig

DATABASE = "gateway.sqlite"
"""The file's name in the server's folder."""
_TOUCHED_AGAIN = timedelta(seconds=1)


class _Table(MappedAsDataclass, DeclarativeBase):
    """Rows are dataclasses."""

    type_annotation_map = {dict[str, str]: JSON}  # noqa: RUF012, SQLAlchemy's name and type


class TrainingRunRow(_Table, kw_only=True):
    """One adapter that a client trains or has trained."""

    __tablename__ = "training_runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    """`<session>:train:<n>`, as the client computes it too."""
    user: Mapped[str] = mapped_column(index=True)
    """Whose key it was made with; empty on a server without keys."""
    base_model: Mapped[str]
    """The name by which the client asked for the model."""
    directory: Mapped[str]
    """Where the model lies."""
    rank: Mapped[int]
    """The rank of the adapter; 0 if all weights are trained."""
    seed: Mapped[int]
    train_attn: Mapped[bool]
    train_mlp: Mapped[bool]
    train_unembed: Mapped[bool]
    user_metadata: Mapped[dict[str, str] | None]
    last_request_at: Mapped[datetime]
    """In UTC."""

    @property
    def lora(self) -> LoRAConfig:
        """The adapter."""
        return LoRAConfig(
            rank=self.rank,
            seed=self.seed,
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
        )


class CheckpointRow(_Table, kw_only=True):
    """A saved state of a run."""

    __tablename__ = "checkpoints"

    path: Mapped[str] = mapped_column(primary_key=True)
    """`tinker://<run>/<weights or sampler_weights>/<name>`."""
    run_id: Mapped[str] = mapped_column(ForeignKey("training_runs.id"), index=True)
    folder: Mapped[str]
    """Where it lies, relative to the server's folder."""
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    size_bytes: Mapped[int]
    user_metadata: Mapped[dict[str, str] | None]


class Database:
    """The server's records. Every method is one short transaction."""

    def __init__(self, file: Path) -> None:
        """Opens the file, or makes it."""
        self._engine = create_engine(f"sqlite:///{file}")
        event.listen(self._engine, "connect", _configure)
        _Table.metadata.create_all(self._engine)
        self._session = sessionmaker(self._engine, expire_on_commit=False)

    def close(self) -> None:
        """Closes the file."""
        self._engine.dispose()

    def save(self, row: TrainingRunRow | CheckpointRow) -> None:
        """Adds a row, or replaces the one with its key."""
        with self._session.begin() as session:
            session.merge(row)

    def run(self, run_id: str) -> TrainingRunRow | None:
        """One training run."""
        with self._session() as session:
            return session.get(TrainingRunRow, run_id)

    def owner(self, session_id: str) -> str | None:
        """The user of a session's training runs, if it had any."""
        # an index of ids serves a prefix; `autoescape` makes % and _ ordinary
        query = select(TrainingRunRow.user).where(TrainingRunRow.id.startswith(f"{session_id}:", autoescape=True))
        with self._session() as session:
            return session.scalars(query.limit(1)).first()

    def runs(self, user: str | None = None) -> list[TrainingRunRow]:
        """The training runs of one user, or of all, the one with the newest request first."""
        query = select(TrainingRunRow).order_by(TrainingRunRow.last_request_at.desc())
        with self._session() as session:
            return list(session.scalars(query if user is None else query.where(TrainingRunRow.user == user)))

    def checkpoint(self, path: str) -> CheckpointRow | None:
        """One checkpoint."""
        with self._session() as session:
            return session.get(CheckpointRow, path)

    def checkpoints(self, run_id: str | None = None, user: str | None = None) -> list[CheckpointRow]:
        """The checkpoints of one run, of one user or of all, newest first."""
        query = select(CheckpointRow).order_by(CheckpointRow.created_at.desc())
        if run_id is not None:
            query = query.where(CheckpointRow.run_id == run_id)
        if user is not None:
            query = query.join(TrainingRunRow).where(TrainingRunRow.user == user)
        with self._session() as session:
            return list(session.scalars(query))

    def delete(self, path: str) -> None:
        """Forgets a checkpoint."""
        with self._session.begin() as session:
            if (row := session.get(CheckpointRow, path)) is not None:
                session.delete(row)

    def touch(self, run: TrainingRunRow) -> None:
        """Notes a request of a run, to within a second: a transaction takes as long as the rest of a request."""
        at = now()
        if at - run.last_request_at >= _TOUCHED_AGAIN:
            run.last_request_at = at
            self.save(run)


def texts(field: str, given: Mapping[str, object] | None) -> dict[str, str] | None:
    """What a client wrote about its run: the SDK sends any JSON, and answers have strings.

    Raises ValueError for text that is not Unicode, which no answer could hold: lists of all runs would fail with it.
    """
    found = {name: str(value) for name, value in (given or {}).items()}
    for each in (*found, *found.values()):
        try:
            each.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{field} has the text {each!r}, which is not Unicode: a surrogate stands alone") from None
    return found or None


def now() -> datetime:
    """The time in UTC. SQLite keeps no time zones, so that there is none in the database."""
    return datetime.now(UTC).replace(tzinfo=None)


def expiry(ttl_seconds: int | None) -> datetime | None:
    """When something saved now expires. Raises ValueError outside of an hour to ten years."""
    if ttl_seconds is None:
        return None
    if not 3600 <= ttl_seconds <= 315_360_000:
        raise ValueError(f"ttl_seconds is {ttl_seconds}; it must be from 3600 (an hour) to 315360000 (ten years)")
    return now() + timedelta(seconds=ttl_seconds)


def _configure(connection: Any, record: object) -> None:
    del record
    # A killed server leaves the last committed state; a power cut may cost the last transactions, never the file.
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
