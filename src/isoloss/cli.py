"""The `isoloss` command: arguments and environment variables, and nothing below reads either.

Recipes are checked before any worker starts. Under torchrun (RANK and WORLD_SIZE in the environment) the
process joins the run; `--nproc N` starts N local workers; otherwise there is one process.
"""

import argparse
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from isoloss import __version__

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_EXTRA = (
    "datasets",
    "huggingface_hub",
    "jinja2",
    "pydantic",
    "pydantic_core",
    "rich",
    "tokenizers",
    "transformers",
    "yaml",
)
"""Packages of `isoloss[train]`."""

_TRAIN_EXAMPLES = """\
examples:
  isoloss train recipes/quickstart.yaml                        one process
  isoloss train recipes/quickstart.yaml --nproc 2              two local processes
  isoloss train R.yaml train.max_steps=4 data.sources.1.weight=2
                                                               other values for this run
  isoloss train R.yaml train.resume_from_checkpoint=auto       go on where the last run stopped
  torchrun --nproc-per-node 8 -m isoloss train R.yaml          processes started by torchrun
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m isoloss train R.yaml                                  several machines

Values are YAML. Relative paths in a recipe start at the working directory. The run is written to
train.output_dir: recipe.yaml, metrics.jsonl, checkpoint-<step>/.
"""

_EXPORT_EXAMPLES = """\
examples:
  isoloss export runs/quickstart                     the newest checkpoint, to a folder in the run
  isoloss export runs/quickstart --checkpoint 100 --output my-model

The folder is loaded by transformers: AutoModelForCausalLM.from_pretrained(FOLDER).
"""


_AUDIT_EXAMPLES = """\
examples:
  isoloss audit                         isoloss itself, in float64 on the CPU
  isoloss audit --nproc 8               with layouts of up to 8 processes
  isoloss audit my_trainer.audit:step   a step of your own: a function AuditCase -> AuditResult, called
                                        in every rank (isoloss.AuditCase explains what it is given)
  isoloss audit --json > audit.json     for machines

Each line is a layout: the relative difference of the loss and of the worst gradient element from a plain
one-process reference, of the losses per source, the token counters, and how many collectives ran. The exit
status is 1 if any line fails.
"""


class _Rank(NamedTuple):
    """This process's place in a run of several."""

    rank: int
    world_size: int
    local_rank: int


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 the run failed, 2 the command or the recipe is wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Checkpoints of one process are meant to be; torch warns of each as if a process group were missing.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        status = _run(given)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        status = _complain(f"the package {package} is not installed; pip install 'isoloss[train]'")
    except KeyboardInterrupt:
        sys.stderr.write("isoloss: interrupted\n")
        status = 130  # what shells report for SIGINT
    sys.stdout.flush()
    sys.exit(status)


def _run(arguments: Sequence[str]) -> int:
    options, rest = _parser().parse_known_args(arguments)
    if options.command == "audit":
        if rest:
            return _complain(f"audit does not know {' '.join(rest)}; see isoloss audit --help")
        return _audit(options)
    if options.command == "export":
        if rest:
            return _complain(f"export does not know {' '.join(rest)}; see isoloss export --help")
        return _export(options)
    # argparse ends a list of positionals at the first flag; what follows the flag belongs to it all the same.
    flags = [argument for argument in rest if argument.startswith("-")]
    if flags:
        overrides = " ".join(flag.lstrip("-") for flag in flags)
        hint = (
            f"write overrides without dashes: {overrides}" if "=" in overrides else "see isoloss train --help"
        )
        return _complain(f"train does not know {' '.join(flags)}; {hint}")
    return _train(options.recipe, [*options.overrides, *rest], options.nproc, options.traceback)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isoloss",
        description="Distributed language-model training: the same loss however the work is split.",
        epilog="`isoloss COMMAND --help` explains a command and shows examples.",
    )
    parser.add_argument("--version", action="version", version=f"isoloss {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    train = commands.add_parser(
        "train",
        help="train a model from a recipe",
        description="Train a model from a recipe, a YAML file.",
        epilog=_TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    train.add_argument("recipe", metavar="RECIPE.yaml", type=Path, help="the recipe")
    train.add_argument(
        "overrides", metavar="key=value", nargs="*", help="other values for keys of the recipe"
    )
    train.add_argument(
        "--nproc", type=_process_count, metavar="N", help="start N local processes (default: 1)"
    )
    train.add_argument("--traceback", action="store_true", help="show where an error came from")
    train.add_argument(
        "-h", "--help", action=_TrainHelp, nargs=0, help="show this text and all keys of a recipe"
    )
    audit = commands.add_parser(
        "audit",
        help="check that a step does not depend on how it is split",
        description="Compare a training step with a plain reference in every layout that fits this machine.",
        epilog=_AUDIT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    audit.add_argument(
        "target", metavar="TARGET", nargs="?", default="self", help="self (isoloss), or MODULE:FUNCTION"
    )
    audit.add_argument(
        "--nproc", type=_process_count, metavar="N", help="most processes to start (default: 4, or the GPUs)"
    )
    audit.add_argument("--json", action="store_true", help="print the findings as JSON")
    export = commands.add_parser(
        "export",
        help="write a transformers folder from a checkpoint",
        description="Write a transformers folder from a checkpoint of a run.",
        epilog=_EXPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    export.add_argument("run", metavar="RUN", type=Path, help="the run's folder, train.output_dir")
    export.add_argument(
        "--checkpoint", type=int, metavar="N", help="the checkpoint's step (default: the newest)"
    )
    export.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: inside RUN)")
    return parser


def _process_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of processes from 1, got {text!r}")
    return int(text)


class _TrainHelp(argparse.Action):
    """Adds the keys of a recipe to the help; they are read from the recipe's own docstrings."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        try:
            from isoloss.train.recipe import describe_keys

            keys = f"keys of a recipe, section by section (default in parentheses):\n\n{describe_keys()}\n"
        except ModuleNotFoundError as error:
            keys = f"The keys are listed once {error.name} is there: pip install 'isoloss[train]'\n"
        sys.stdout.write(f"{parser.format_help()}\n{keys}")
        parser.exit()


def _complain(message: str) -> int:
    sys.stderr.write(f"isoloss: {message}\n")
    return 2


def _train(path: Path, overrides: Sequence[str], nproc: int | None, show_traceback: bool) -> int:
    from isoloss.train.recipe import RecipeError, check_world_size, load_recipe

    place = _rank_from_environment(os.environ)
    if place is not None and nproc is not None:
        return _complain("--nproc starts processes, but torchrun has started this one; leave --nproc out")
    world_size = place.world_size if place else nproc or 1
    command = _command(sys.argv[0], Path.cwd())
    try:
        check_world_size(load_recipe(path, overrides), world_size)
        if place is None and world_size > 1:
            return _launch(world_size, _train_rank, (path, overrides, command), show_traceback)
        _work(_train_rank, (path, overrides, command), place)
    except RecipeError as error:
        if place is None or place.local_rank == 0:  # every rank of a machine reads the same file
            sys.stderr.write(f"{error}\n")
        return 2
    except (ValueError, RuntimeError, OSError) as error:
        if place is not None:
            raise  # torchrun tells which rank it was
        return _show_failure(_Failure.of(error, rank=0), show_traceback)
    return 0


def _rank_from_environment(environment: Mapping[str, str]) -> _Rank | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank = int(environment["RANK"])
    return _Rank(rank, int(environment["WORLD_SIZE"]), int(environment.get("LOCAL_RANK", rank)))


def _command(program: str, folder: Path) -> str:
    """How this program was started, as it can be typed in `folder`.

    Args:
        program: its first argument, a script or the module's file.
        folder: where commands are typed.
    """
    if Path(program).name == "isoloss" and shutil.which("isoloss") != os.path.abspath(program):
        return shlex.quote(_from(folder, program))
    if Path(program).name == "__main__.py":
        return f"{shlex.quote(_from(folder, sys.executable))} -m isoloss"
    return "isoloss"


def _from(folder: Path, program: str) -> str:
    """The path of a program, from `folder` where it lies in it."""
    path = Path(os.path.abspath(program))  # not resolved: the python of a venv is a link out of it
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _train_rank(rank: int, path: Path, overrides: Sequence[str], command: str) -> None:
    """Train in this process, which has joined the run if it has several ranks."""
    from isoloss.train.recipe import load_recipe
    from isoloss.train.trainer import run

    run(load_recipe(path, overrides), command=command)


def _work(
    function: Callable[..., None], given: Sequence[Any], place: _Rank | None, reports: Path | None = None
) -> None:
    """Call `function(rank, *given)` in this process: as one rank of the run, or alone."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from isoloss.topology import process_group

    if place is None:
        function(0, *given)
        return
    # The report is inside the group: it is written while the peers still wait for this rank.
    with process_group(**place._asdict()), _FailureReport(reports, place.rank):
        record(function)(place.rank, *given)  # torchrun's summary shows what this records


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception that ended a rank, as it travels from a worker to the launcher."""

    rank: int
    time_ns: int
    kind: str
    message: str
    traceback: str
    is_ours: bool
    """Raised by isoloss itself, about something that the user can change: the message says it all."""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "_Failure":
        frames = traceback.extract_tb(error.__traceback__)
        package = str(Path(__file__).parent)
        return cls(
            rank=rank,
            time_ns=time.time_ns(),
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            is_ours=bool(frames) and frames[-1].filename.startswith(package) and _is_addressed(error),
        )


def _is_addressed(error: BaseException) -> bool:
    """Whether an error was written for the user, rather than met by accident."""
    if isinstance(error, OSError):
        return error.errno is None  # the system's own errors carry its number
    return isinstance(error, ValueError) or type(error).__module__.startswith("isoloss.")


class _FailureReport:
    """Writes an exception that leaves its block to `DIRECTORY/RANK.json`; None writes nothing."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._directory = directory
        self._rank = rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or self._directory is None or isinstance(error, KeyboardInterrupt | SystemExit):
            return
        failure = _Failure.of(error, self._rank)
        (self._directory / f"{self._rank}.json").write_text(json.dumps(asdict(failure)), encoding="utf-8")


def _worker(function: Callable[..., None], given: Sequence[Any], nproc: int, reports: Path) -> None:
    """What each process of `--nproc` runs; the launcher has set its RANK."""
    import torch

    logging.disable(logging.NOTSET)  # a forked worker inherits the parent's silence
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _usable_cores() // nproc))  # more threads than cores slow every rank
    _work(function, given, _rank_from_environment(os.environ), reports)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _launch(
    nproc: int, function: Callable[..., None], given: Sequence[Any], show_traceback: bool = False
) -> int:
    """Call `function(rank, *given)` in `nproc` local workers; a failure is shown once."""
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    import isoloss.train.trainer  # noqa: F401 - forked workers share what is imported here

    # Fork takes tenths of a second where spawn imports torch again in each worker; CUDA does not survive it.
    can_fork = sys.platform == "linux" and not torch.cuda.is_available()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; host names may not resolve
    logging.disable(logging.ERROR)  # the launcher logs every failed process at length; see below
    with tempfile.TemporaryDirectory(prefix="isoloss-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="isoloss",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="fork" if can_fork else "spawn",
            logs_specs=DefaultLogsSpecs(log_dir=directory),
        )
        try:
            elastic_launch(config, _worker)(function, given, nproc, Path(directory))
        except ChildFailedError as error:
            return _show_first_failure(Path(directory), *error.get_first_failure(), show_traceback)
        except SignalException as error:
            return 128 + error.sigval
        finally:
            logging.disable(logging.NOTSET)
    return 0


def _show_first_failure(reports: Path, rank: int, ended: "ProcessFailure", show_traceback: bool) -> int:
    """Show what failed first; the other ranks fail after it, because a peer is gone.

    Args:
        reports: where the workers wrote theirs.
        rank: the rank whose end the launcher noticed first.
        ended: what the launcher knows of it.
        show_traceback: as `--traceback`.
    """
    written = [
        _Failure(**json.loads(report.read_text(encoding="utf-8"))) for report in reports.glob("*.json")
    ]
    if written:
        return _show_failure(min(written, key=lambda failure: failure.time_ns), show_traceback)
    if ended.exitcode < 0:
        cause = f"was killed by {signal.Signals(-ended.exitcode).name}; out of memory is a common cause"
    else:
        cause = f"ended with status {ended.exitcode} before it joined the run: {ended.message}"
    sys.stderr.write(f"isoloss: rank {rank} {cause}\n")
    return 1


def _show_failure(failure: _Failure, show_traceback: bool) -> int:
    if failure.kind == "RecipeError":
        sys.stderr.write(f"{failure.message}\n")
        return 2
    if failure.is_ours and not show_traceback:
        sys.stderr.write(f"isoloss: {failure.message}\n")
        return 1
    sys.stderr.write(f"isoloss: rank {failure.rank} failed; the run has stopped\n\n{failure.traceback}")
    if "by peer" in failure.message:  # gloo's words; the rank that went first left no report
        sys.stderr.write(
            "isoloss: a rank that wrote no error is gone, so it was probably killed; out of memory is a "
            "common cause\n"
        )
    return 1


def _export(options: argparse.Namespace) -> int:
    from isoloss.train.export import export_run

    try:
        folder = export_run(options.run, options.checkpoint, options.output)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"isoloss: {error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


def _audit(options: argparse.Namespace) -> int:
    import torch

    from isoloss.audit.runner import run_audit
    from isoloss.audit.show import print_findings

    devices = [("cpu", "float64")]
    nproc = options.nproc or 4
    if torch.cuda.is_available():
        devices = [("cuda", "float32"), ("cuda", "bfloat16")]
        nproc = options.nproc or torch.cuda.device_count()

    def launch(world_size: int, function: Callable[..., None], given: Sequence[Any]) -> int:
        if world_size > 1:
            return _launch(world_size, function, given)
        function(0, *given)
        return 0

    with tempfile.TemporaryDirectory(prefix="isoloss-audit-") as folder:
        try:
            findings = print_findings(
                run_audit(options.target, nproc, devices, Path(folder), launch), as_json=options.json
            )
        except (ValueError, RuntimeError) as error:
            return _show_failure(_Failure.of(error, rank=0), show_traceback=False)
    return 0 if all(finding.passed for finding in findings) else 1
