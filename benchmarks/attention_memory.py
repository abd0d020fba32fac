"""Peak memory of attention, forward and backward, against the slots of the window: is it linear?

Each measurement is one process per rank, which asks the kernel for the most memory that it ever held above
what it held before. A window of T slots doubles from row to row: a peak that doubles too is linear, one that
grows fourfold is the matrix of scores.

    python benchmarks/attention_memory.py
    python benchmarks/attention_memory.py --slots 4096 8192 --cases cp2 softcap
"""

import argparse
import ctypes
import os
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from isoloss import Layout, Topology
from isoloss.parallel.attention import packed_attention

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 4, 2, 32
MALLOC_MMAP_THRESHOLD = -3  # mallopt: from this size on, freed memory goes back at once

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    # name: (sizes of the axes, options of the attention)
    "one rank": ({}, {}),
    "many documents": ({}, {}),
    "prefix": ({}, {}),
    "window 1024": ({}, {"sliding_window": 1024}),
    "softcap": ({}, {"softcap": 30.0}),
    "sp2": ({"sp_size": 2}, {}),
    "cp2": ({"cp_size": 2}, {}),
}


def build_layout(case: str, slots: int) -> Layout:
    """One document as long as the window, the worst case, unless the case says otherwise."""
    if case == "many documents":
        return Layout([509] * (slots // 512), alignment=8, padded_length=slots)
    if case == "prefix":
        # half the window is a prompt, and each of eight answers attends to all of it
        answers = [slots // 16 - 3] * 8
        return Layout([slots // 2, *answers], None, [0] * 9, [-1] + [0] * 8, alignment=8, padded_length=slots)
    return Layout([slots], alignment=8)


def memory_kib(field: str) -> int:
    """What Linux says of this process: VmRSS is held now, VmHWM the most that was."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def measure(rank: int, ranks: int, case: str, slots: int, rendezvous: str, results: Any) -> None:
    """Body of one process: puts (peak above the start in KiB, seconds) on the queue."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(MALLOC_MMAP_THRESHOLD, 65536)
    sizes, options = CASES[case]
    topology = None
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
        topology = Topology(**sizes)
        dist.barrier()
    torch.manual_seed(rank)
    layout = build_layout(case, slots)
    attend(build_layout(case, 1024), topology, ranks, options)  # what the first call loads is no peak
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")  # the peak starts from here
    before = memory_kib("VmRSS")
    start = time.perf_counter()
    attend(layout, topology, ranks, options)
    results.put((memory_kib("VmHWM") - before, time.perf_counter() - start))
    results.close()
    results.join_thread()
    os._exit(0)


def attend(layout: Layout, topology: Topology | None, ranks: int, options: dict[str, Any]) -> None:
    """Forward and backward of one attention call on this rank's slots."""
    parts = [
        torch.randn(1, heads, layout.physical_tokens // ranks, HEAD_DIM, requires_grad=True)
        for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    ]
    output, _ = packed_attention(nn.Identity(), *parts, None, layout=layout, topology=topology, **options)
    output.sum().backward()


def peak(case: str, slots: int) -> tuple[float, float]:
    """(MiB, seconds) of the rank that needs most."""
    ranks = 2 if CASES[case][0] else 1
    context = mp.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = os.path.join(directory, "store")
        processes = [
            context.Process(target=measure, args=(rank, ranks, case, slots, rendezvous, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join()
    return max(kib for kib, _ in found) / 1024, max(seconds for _, seconds in found)


def main() -> int:
    """Prints the table; status 1 if a case grows faster than linear."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    print(
        f"{HEADS} heads of {HEAD_DIM}, {KEY_VALUE_HEADS} key heads, float32, per rank, "
        f"torch {torch.__version__}"
    )
    print(f"{'case':<16}" + "".join(f"{slots:>12} slots" for slots in arguments.slots) + "   growth")
    status = 0
    for case in arguments.cases:
        peaks = [peak(case, slots) for slots in arguments.slots]
        # the exponent of the law between the first and the last: 1 is linear, 2 is the matrix of scores
        factor = arguments.slots[-1] / arguments.slots[0]
        exponent = torch.tensor(peaks[-1][0] / peaks[0][0]).log() / torch.tensor(factor).log()
        cells = "".join(f"{mib:>8.1f} MiB {seconds:>4.0f} s" for mib, seconds in peaks)
        print(f"{case:<16}{cells}   T^{exponent:.2f}", flush=True)
        status |= int(exponent > 1.15)
    return status


if __name__ == "__main__":
    sys.exit(main())
