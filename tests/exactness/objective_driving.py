"""Runs one step of an objective in every layout, and compares every number and gradient element."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from exactness.driving import TOLERANCE, close, full_gradients
from isoloss import Document, Ledger, LossModel, PackedBatch, Topology, sum_gradients
from isoloss.batch.collation import build_batch
from isoloss.objectives.objective import AbstractObjective
from isoloss.parallel.wrap import wrap_model
from oracle.single_process import worst_difference
from ranks import run_on_ranks


@dataclass(frozen=True)
class Setting:
    """Ranks, sizes besides dp_shard, and micro-batches."""

    ranks: int
    sizes: tuple[tuple[str, int], ...] = ()
    accumulation: int = 1

    @property
    def topology(self) -> Topology:
        return Topology(**dict(self.sizes)) if self.ranks > 1 else Topology.single()


SETTINGS = {
    "alone": Setting(1),
    "alone x 3": Setting(1, (), 3),
    "dp2": Setting(2),
    "dp2 x 3": Setting(2, (), 3),
    "ddp2": Setting(2, (("dp_replicate_size", 2),)),
    "sp2": Setting(2, (("sp_size", 2),)),
    "cp2": Setting(2, (("cp_size", 2),), 3),
    "tp2": Setting(2, (("tp_size", 2),), 3),
    "hsdp2x2": Setting(4, (("dp_replicate_size", 2),)),
    "dp2sp2": Setting(4, (("sp_size", 2),), 3),
    "sp2cp2": Setting(4, (("sp_size", 2), ("cp_size", 2))),
}
"""The layouts that every objective goes through, besides ep2 for a mixture of experts."""

MIXTURE_SETTINGS = {"ep2": Setting(2, (("ep_size", 2),)), "ep2 x 3": Setting(2, (("ep_size", 2),), 3)}


@dataclass(frozen=True)
class Expected:
    """What the oracle says: numbers by metric name, names that must not be shown, gradients by parameter."""

    metrics: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """An objective on documents.

    The functions are called on every rank, after the topology is there.
    """

    build_model: Callable[[], nn.Module]
    units: Sequence[Sequence[Document]]
    window: int
    channels: tuple[str, ...]
    build_objective: Callable[[Topology], AbstractObjective]
    term: str
    complete: Callable[[PackedBatch], PackedBatch] = lambda batch: batch
    blocks: Callable[[Any], list[nn.Module]] = lambda model: list(model.get_decoder().layers)


def own_windows(trial: Trial, setting: Setting, topology: Topology) -> list[PackedBatch]:
    """This data rank's windows, units in turn; with accumulation each rank's last window is empty."""
    full = max(setting.accumulation - 1, 1)
    places = list(itertools.product(range(full), range(topology.data_size)))
    mine = []
    for number, (_, data_rank) in enumerate(places):
        units = trial.units[number :: len(places)]
        if data_rank == topology.data_rank:
            window = build_batch(units, trial.window, term=trial.term)
            mine.append(trial.complete(window))
    return mine + [PackedBatch.empty(trial.window)] * (setting.accumulation - full)


def run_trial(trial: Trial, setting: Setting) -> tuple[dict[str, float], dict[str, Tensor]]:
    topology = setting.topology
    objective = trial.build_objective(topology)
    inner = trial.build_model()
    outer = wrap_model(LossModel(inner), trial.blocks(inner), topology)
    gradients = sum_gradients(outer, topology)
    ledger = Ledger(objective.terms, channels=trial.channels, topology=topology, measures=objective.measures)
    windows = own_windows(trial, setting, topology)
    with ledger.step(windows, gradients=gradients) as step:
        for batch in step:
            outer(step, batch, objective).backward()
    return step.metrics(), full_gradients(inner)


def differences(metrics: Mapping[str, float], gradients: dict[str, Tensor], expected: Expected) -> list[str]:
    found = [
        f"{name} is {metrics.get(name)!r}, expected {value!r}"
        for name, value in expected.metrics.items()
        if name not in metrics or not close(metrics[name], value)
    ]
    found += [f"{name} is shown" for name in expected.absent if name in metrics]
    found += [
        f"{name} is 0" for name in ("health/books_balance", "health/counts_ordered") if not metrics[name]
    ]
    difference, where = worst_difference(gradients, dict(expected.gradients))
    if not difference <= TOLERANCE:
        found.append(f"gradient of {where} differs by {difference:.3g} of its largest element")
    return found


def _run_all(trials: Sequence[tuple[str, Trial, Expected]], settings: Mapping[str, Setting]) -> list[str]:
    return [
        f"{name}, {layout}: {difference}"
        for layout, setting in settings.items()
        for name, trial, expected in trials
        for difference in differences(*run_trial(trial, setting), expected)
    ]


def check_layouts(
    ranks: int,
    trials: Sequence[tuple[str, Trial, Expected]],
    settings: Mapping[str, Setting] = SETTINGS,
    *,
    timeout_s: float = 240,
) -> None:
    """Every trial in every setting of that many ranks, in one group of processes."""
    chosen = {name: setting for name, setting in settings.items() if setting.ranks == ranks}
    assert chosen
    if ranks == 1:
        results = [_run_all(trials, chosen)]
    else:
        results = run_on_ranks(ranks, _run_all, trials, chosen, timeout_s=timeout_s)
    for rank, failures in enumerate(results):
        assert not failures, f"rank {rank}: {len(failures)} differences\n" + "\n".join(failures[:20])
