"""Time, memory and the load of other programs, for the benchmarks beside this file."""

import ctypes
import datetime
import gc
import importlib.metadata
import math
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """One timed call."""

    wall_s: float
    cpu_s: float
    """Of all threads of this process."""
    foreign_frac: float
    """Share of the machine that other programs used meanwhile; NaN where /proc/stat does not exist."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` values."""

    low: float
    median: float
    high: float
    count: int

    def __str__(self) -> str:
        median = f"{self.median:.2f}"
        return f"{median} (once)" if self.count == 1 else f"{median} [{self.low:.2f}, {self.high:.2f}]"


def spread(values: Sequence[float]) -> Spread:
    """Quartiles by linear interpolation; of one value, that value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high, len(values))


def busy_s() -> float:
    """CPU seconds that this machine has worked, for whomever; NaN where /proc/stat does not exist."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except FileNotFoundError:
        return math.nan
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(part) for part in first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def time_call(call: Callable[[], object]) -> Timing:
    """Time of one call, garbage collected before."""
    gc.collect()
    busy, cpu, wall = busy_s(), time.process_time(), time.perf_counter()
    call()
    wall, cpu, busy = time.perf_counter() - wall, time.process_time() - cpu, busy_s() - busy
    foreign = (busy - cpu) / (wall * (os.cpu_count() or 1))
    return Timing(wall, cpu, max(foreign, 0.0) if wall > 0.2 else 0.0)  # the kernel counts in steps of 10 ms


def time_rounds(
    calls: Mapping[str, Callable[[int], object]],
    rounds: int,
    takes_part: Callable[[str, Sequence[Mapping[str, Timing]]], bool],
    *,
    twice: frozenset[str] = frozenset(),
    seed: int = 0,
) -> list[dict[str, Timing]]:
    """Time calls in rotation, in random order within each round.

    Args:
        calls: by name; each is given the number of the set of inputs to use.
        rounds: how many to return.
        takes_part: whether this name is called in the round after these.
        twice: names timed twice in a round; the mean of both stands.
        seed: of the order.
    """
    order = random.Random(seed)
    done: list[dict[str, Timing]] = []
    number = 0
    for _ in range(rounds):
        names = [name for name in (*calls, *twice) if takes_part(name, done)]
        taken: dict[str, list[Timing]] = {}
        for name in order.sample(names, len(names)):
            taken.setdefault(name, []).append(time_call(lambda name=name, number=number: calls[name](number)))
            number += 1  # no call sees the inputs of the one before
        done.append({name: _mean(timings) for name, timings in taken.items()})
    return done


def foreign_load(round_: Mapping[str, Timing]) -> float:
    """Share of the machine that other programs had in a round, over its whole time."""
    return sum(t.foreign_frac * t.wall_s for t in round_.values()) / sum(t.wall_s for t in round_.values())


def _mean(timings: Sequence[Timing]) -> Timing:
    columns = zip(*((t.wall_s, t.cpu_s, t.foreign_frac) for t in timings), strict=True)
    return Timing(*(statistics.fmean(column) for column in columns))


def in_fresh_process(function: Callable[..., Any], *arguments: object) -> Any:
    """`function(*arguments)` in a process of its own that has computed nothing before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def peak_memory_mib(prepare: Callable[[], Callable[[], object]]) -> float:
    """Largest resident memory during a call, above what was resident before it, in MiB; Linux only.

    Args:
        prepare: allocates the inputs and returns the call. What it did before that is not counted, so it
            should have made the call once on small inputs, which loads libraries and starts threads.
    """
    call = prepare()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what is free counts as resident and hides an allocation
    before = _status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    kept = call()
    peak = _status_mib("VmHWM")
    del kept
    return peak - before


def _status_mib(name: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None, f"/proc/self/status has no {name}"
    return int(match[1]) / 1024


def describe_machine(packages: Sequence[str] = ()) -> dict[str, str]:
    """Date, processor, threads and versions."""
    described = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{os.cpu_count()} x {_cpu_name()}",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }
    for package in packages:
        try:
            described[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            described[package] = "not installed"
    return described


def _cpu_name() -> str:
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return name
    fields = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    vectors = next((v for v in ("avx512f", "avx2", "asimd") if v in fields.get("flags", "").split()), "")
    model = f"{fields.get('model name', name)}, family {fields.get('cpu family')} model {fields.get('model')}"
    return f"{model}, {vectors}" if vectors else model


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table that Markdown reads too."""
    widths = [max(len(str(row[place])) for row in [columns, *rows]) for place in range(len(columns))]
    print(f"\n{title}\n", flush=True)
    for number, row in enumerate([columns, *rows]):
        cells = (str(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"| {' | '.join(cells)} |", flush=True)
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|", flush=True)
