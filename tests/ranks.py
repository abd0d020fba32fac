"""Run a test body on several gloo ranks.

`fork` costs 0.1 to 0.3 s a test on two cores where `spawn` costs 10 to 29 s: the children inherit the
imported torch and transformers. Forking is safe because the parent keeps to one thread (conftest.py)
and never touches CUDA.
"""

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _run_rank(
    rank: int, world_size: int, rendezvous: str, results: Any, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        outcome = ("ok", body(*args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: B036, BLE001 - the parent re-raises the traceback
        outcome = ("error", traceback.format_exc())
    results.put((rank, *outcome))
    results.close()
    results.join_thread()
    os._exit(0)


def run_on_ranks(
    world_size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call `body(*args)` on every rank and return the results in rank order.

    Results travel by pickle: return plain numbers, strings, lists and numpy arrays rather than tensors.
    A failure on any rank fails the caller with that rank's traceback; the other ranks are stopped.
    """
    context = mp.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = os.path.join(directory, "store")
        processes = [
            context.Process(target=_run_rank, args=(rank, world_size, rendezvous, results, body, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        collected: dict[int, Any] = {}
        try:
            while len(collected) < world_size:
                rank, status, value = results.get(timeout=timeout_s)
                if status == "error":
                    raise AssertionError(f"rank {rank} of {world_size} failed:\n{value}")
                collected[rank] = value
        finally:
            for process in processes:
                process.join(timeout=5 if len(collected) == world_size else 0.1)
                if process.is_alive():
                    process.kill()
    return [collected[rank] for rank in range(world_size)]


def on_ranks(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test so that its body runs on `world_size` gloo ranks."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            run_on_ranks(world_size, functools.partial(body, *args, **kwargs))

        return wrapper

    return decorate
