"""What a person sees while a run goes on: a bar in a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from typing import Any, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from isoloss.reduction.terms import escape_name

_PARTS = 1000  # resolution of the bar when the number of steps is not known


@final
class ProgressDisplay:
    """Progress of a run on one rank.

    Args:
        console: where to write.
        max_steps: steps of the run; None where tokens or passes end it.
        resumed_step: steps done before.
    """

    def __init__(self, console: Console, max_steps: int | None, resumed_step: int) -> None:
        self._console = console
        self._max_steps = max_steps
        self._bar: Progress | None = None
        if console.is_terminal:
            counter = (
                [MofNCompleteColumn()] if max_steps is not None else [TextColumn("{task.percentage:.0f}%")]
            )
            self._bar = Progress(
                TextColumn("step {task.fields[step]}"),
                BarColumn(),
                *counter,
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=console,
            )
            self._task = self._bar.add_task(
                "train", total=max_steps or _PARTS, completed=resumed_step, step=resumed_step, numbers=""
            )
            self._bar.start()

    def advance(self, step: int, progress: float, metrics: Mapping[str, float]) -> None:
        """`step` steps and the part `progress` of the run are done; no `metrics` between logged steps."""
        numbers = summary(metrics)
        if self._bar is not None:
            completed = step if self._max_steps is not None else progress * _PARTS
            self._bar.update(self._task, completed=completed, step=step)
            if numbers:
                self._bar.update(self._task, numbers=numbers)
        elif numbers:
            self.say(f"step {step}  {numbers}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


def summary(metrics: Mapping[str, float]) -> str:
    """The numbers that people watch, on one line."""
    wanted = {
        "train/loss": "loss {:.4f}",
        "eval/loss": "held-out loss {:.4f}",
        "train/grad_norm": "grad norm {:.3f}",
        "train/learning_rate": "lr {:.2e}",
        "throughput/source_tokens_per_sec": "{:,.0f} tokens/s",
    }
    return "  ".join(form.format(metrics[name]) for name, form in wanted.items() if name in metrics)


def channel_table(
    channels: tuple[str, ...],
    totals: Mapping[str, Mapping[str, int]],
    first: Mapping[str, float],
    last: Mapping[str, float],
) -> Table:
    """What each channel was trained on and what it learned.

    Args:
        channels: names.
        totals: counts of the run by channel (`Ledger.channel_totals`).
        first: metrics of the first evaluation, empty without one.
        last: metrics of the last evaluation.
    """
    table = Table(title="Channels", title_justify="left")
    table.add_column("channel")
    for heading in ("documents", "tokens", "loss tokens"):
        table.add_column(heading, justify="right")
    if last:
        for heading in ("held-out loss, first", "last", "change"):
            table.add_column(heading, justify="right")
    rows = [(name, f"eval/channel_loss/{escape_name(name)}", totals[name]) for name in channels]
    everything = {
        key: sum(counts[key] for counts in totals.values())
        for key in ("documents", "source_tokens", "tokens")
    }
    rows.append(("all", "eval/loss", everything))
    for name, metric, counts in rows:
        cells = [name, *(f"{counts[key]:,}" for key in ("documents", "source_tokens", "tokens"))]
        if last:
            before, after = first.get(metric), last.get(metric)
            cells += [
                "-" if before is None else f"{before:.4f}",
                "-" if after is None else f"{after:.4f}",
                "-" if before is None or after is None else f"{after - before:+.4f}",
            ]
        table.add_row(*cells, end_section=name == channels[-1])
    return table


def packing_summary(lanes: Mapping[str, Any]) -> str:
    """What became of the rows of a run, over all lanes (their states as a checkpoint keeps them)."""
    records = [lane["packer"]["record"] for lane in lanes.values()]

    def total(name: str) -> int:
        return sum(record[name] for record in records)

    return (
        f"Rows: {total('rows_in'):,} read; {total('rows_whole'):,} packed whole, {total('rows_split'):,} "
        f"split, {total('rows_truncated'):,} truncated ({total('tokens_truncated'):,} tokens cut off), "
        f"{total('rows_dropped'):,} dropped ({total('tokens_dropped'):,} tokens)"
    )
