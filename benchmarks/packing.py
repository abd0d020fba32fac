"""Time and fill of packing, for growing numbers of documents.

    python benchmarks/packing.py                                # 10^4, 10^5, 10^6 documents
    python benchmarks/packing.py --documents 1000 4000 --window 2048

Lengths are log-normal (median 300, sigma 1.2, cut at the window). CPU time per document is to stay the same:
the last column is it relative to the first row. The windows are complete: tokens, targets and counts.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from isoloss.batch.document import Document
from isoloss.batch.packing import DEFAULT_LOOKAHEAD, Packer


@dataclass(slots=True)
class Measurement:
    """Times of one stream of documents through a packer."""

    windows: int = 0
    packed_tokens: int = 0
    adding_s: float = 0.0
    taking_s: float = 0.0
    longest_s: float = 0.0
    """Of taking one window."""

    def take(self, packer: Packer[int]) -> None:
        """Take one window."""
        start = time.process_time()
        window = packer.pop()
        elapsed_s = time.process_time() - start
        self.windows += 1
        self.packed_tokens += window.batch.layout.source_tokens
        self.taking_s += elapsed_s
        self.longest_s = max(self.longest_s, elapsed_s)


def draw_documents(number: int, window: int, seed: int) -> Iterator[Document]:
    """Documents whose tokens are views of one tensor, so that drawing them costs next to nothing."""
    draw = random.Random(seed)
    tokens = torch.arange(window)
    for _ in range(number):
        yield Document(tokens[: min(window, max(1, int(draw.lognormvariate(5.703782, 1.2))))])


def measure(number: int, window: int, alignment: int, lookahead: int, seed: int) -> Measurement:
    """Send `number` documents through a packer."""
    packer: Packer[int] = Packer(window, alignment=alignment, lookahead=lookahead)
    seen = Measurement()
    for key, document in enumerate(draw_documents(number, window, seed)):
        start = time.process_time()
        packer.add([document], key)
        seen.adding_s += time.process_time() - start
        while packer.ready:
            seen.take(packer)
    while not packer.empty:
        seen.take(packer)
    return seen


def main() -> None:
    """Print one line for each number of documents."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--alignment", type=int, default=8)
    parser.add_argument("--lookahead", type=int, default=DEFAULT_LOOKAHEAD)
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    torch.set_num_threads(1)
    numbers = arguments.pop("documents")
    measure(500, **arguments)  # warm up
    print("one thread;", ", ".join(f"{name} {value}" for name, value in arguments.items()))
    print(
        f"{'documents':>10} {'windows':>8} {'fill':>7} {'documents/s':>12} {'windows/s':>10} "
        f"{'add us/doc':>11} {'pop us/win':>11} {'longest ms':>11} {'us/document':>12} {'ratio':>6}"
    )
    first_s = 0.0
    for number in numbers:
        seen = measure(number, **arguments)
        total_s = seen.adding_s + seen.taking_s
        each_s = total_s / number
        first_s = first_s or each_s
        print(
            f"{number:>10} {seen.windows:>8} {seen.packed_tokens / seen.windows / arguments['window']:>7.4f} "
            f"{number / total_s:>12.0f} {seen.windows / total_s:>10.0f} "
            f"{seen.adding_s / number * 1e6:>11.1f} {seen.taking_s / seen.windows * 1e6:>11.0f} "
            f"{seen.longest_s * 1e3:>11.1f} {each_s * 1e6:>12.1f} {each_s / first_s:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
