"""TensorBoard: event files in the run's folder `tensorboard/`, without importing torch or TensorFlow."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from controller.runs.folder import RunFolder
from controller.runs.metric_rows import metric_rows
from controller.runs.observers import Observer
from ownloop_report.dashboards import SAMPLE_COLUMNS, grouped, sample_table
from rl.types import Group


class EventFiles(Observer):
    """Writes scalars under the names of `grouped`, and samples as text.

    A resumed run adds a file, whose first event has TensorBoard drop what follows the checkpoint in older files.
    """

    only_named = True
    requires = "tensorboard"

    def __init__(self, folder: RunFolder) -> None:
        """The files go to the folder `tensorboard` of the run."""
        super().__init__(folder)
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # Protobuf makes these classes when the modules are loaded, so that no checker knows them.
        self._session: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
        self._event: Any = getattr(event_pb2, "Event")  # noqa: B009
        self._summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009
        self._text = text_pb
        self._writer = EventFileWriter(str(folder.path / "tensorboard"))
        if not folder.resumed:
            self._write_config()

    def resume(self, last_step: int) -> None:
        """See `Observer`. Writes the rows of the last step again: an older file may have an evaluation after it."""
        start = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=last_step, session_log=start))
        if last_step == 0:
            self._write_config()
        for row in metric_rows(self.folder.metrics_file):
            if int(row["step"]) == last_step:
                self.log_metrics(row)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """See `Observer`. TensorBoard draws a value that is not finite as a gap."""
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in grouped(metrics).items()
            if name != "step" and not math.isinf(value)
        ]
        self._write(int(metrics["step"]), self._summary(value=values))

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """See `Observer`."""
        lines = [" | ".join(_cell(value) for value in row) for row in (SAMPLE_COLUMNS, *sample_table(groups))]
        table = "\n".join([f"| {lines[0]} |", "|---|---|---|", *(f"| {line} |" for line in lines[1:])])
        self._write(step, self._text(f"samples/{split}", table))

    def _write_config(self) -> None:
        rows = "\n".join(f"| {name} | `{value}` |" for name, value in self.folder.config.items())
        self._write(0, self._text("config", f"| field | value |\n|---|---|\n{rows}"))

    def close(self) -> None:
        """See `Observer`."""
        self._writer.close()

    def _write(self, step: int, summary: object) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()  # otherwise a running run is shown two minutes late


def _cell(value: object) -> str:
    """One cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")
