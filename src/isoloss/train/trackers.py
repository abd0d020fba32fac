"""Where the numbers of a run are written: metrics.jsonl always, TensorBoard when asked."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, final

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """Takes the metrics of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`."""

    def close(self) -> None:
        """Flush and let go."""


@final
class JsonLines:
    """One JSON object a logged step in metrics.jsonl: `step`, then metric names as keys.

    Args:
        output_dir: of the run.
        resumed_step: lines after this step are dropped: the run that is resumed writes them again. 0 starts
            the file anew.
    """

    def __init__(self, output_dir: Path, resumed_step: int) -> None:
        path = output_dir / METRICS_FILE
        kept = [line for line in read_metrics(output_dir) if line["step"] <= resumed_step and resumed_step]
        partial = path.with_name(f"{METRICS_FILE}.partial")
        partial.write_text("".join(_line(values) for values in kept), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line, at once on disk for readers."""
        self._file.write(_line({"step": step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(values: Mapping[str, float]) -> str:
    # JSON has no NaN: a loss that is not finite is written as null, which every reader takes.
    finite = {name: (value if math.isfinite(value) else None) for name, value in values.items()}
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"


def read_metrics(output_dir: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl; a last line that a kill cut short is left out."""
    path = output_dir / METRICS_FILE
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


@final
class TensorBoard:
    """Scalars for TensorBoard in `output_dir/tensorboard`."""

    def __init__(self, output_dir: Path, resumed_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ValueError(
                "train.report_to has tensorboard, which is not installed; pip install "
                "'isoloss[tensorboard]', or remove it from train.report_to"
            ) from error
        self._writer = SummaryWriter(output_dir / "tensorboard", purge_step=resumed_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def open_trackers(output_dir: Path, report_to: Sequence[str], resumed_step: int) -> list[Tracker]:
    """metrics.jsonl and what `report_to` asks for."""
    trackers: list[Tracker] = [JsonLines(output_dir, resumed_step)]
    if "tensorboard" in report_to:
        trackers.append(TensorBoard(output_dir, resumed_step))
    return trackers
