"""The rules that hold the package together: who imports whom, who communicates, and no soft contracts.

Every check is a function over parsed modules, and comes with a planted violation that it must find.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "isoloss"

LEVELS = {
    "isoloss.topology": 0,
    "isoloss.batch": 0,
    "isoloss.losses": 0,
    "isoloss.sharding": 0,  # `PackedBatch.shard` calls it
    "isoloss.flops": 1,
    "isoloss.reduction": 1,
    "isoloss.parallel": 2,
    "isoloss.objectives": 2,
    "isoloss.data": 2,
    "isoloss.train": 3,
    "isoloss.audit": 3,
    "isoloss.integrations": 3,
    "isoloss.report": 3,
    "isoloss.cli": 4,
    "isoloss.__main__": 4,
}
CORE_LEVEL = 1
"""The core, up to this level, imports torch and the standard library alone."""
OPTIONAL_IMPORTS = {"isoloss.losses.linear_cross_entropy.triton_kernels": "triton"}
"""Modules of the core that need one more package, and are imported only when what they do is asked for."""

MAY_COMMUNICATE = (
    "isoloss.topology",
    "isoloss.reduction",
    "isoloss.parallel",
    "isoloss.losses.linear_cross_entropy.vocab_parallel",
    "isoloss.train.checkpoint",
)
LAUNCHER = ("torch.distributed.elastic", "torch.distributed.launcher")
"""What the command line needs to start processes; nothing in there communicates."""

RANK_QUESTIONS = ("get_rank", "get_world_size", "get_group_rank", "get_global_rank", "get_local_rank")

# [Note: micro-batch path] What runs between two micro-batches of a step. A host that waits for the device
# there makes the device wait for the host. Whole modules without the functions that run outside the loop, and
# of modules with other parts, functions.
MICRO_BATCH_MODULES = (
    "isoloss.losses.linear_cross_entropy",
    "isoloss.losses.router",
    "isoloss.parallel.attention",
    "isoloss.parallel.routers",
    "isoloss.reduction.step",
    "isoloss.sharding",
)
OUTSIDE_THE_LOOP = {
    "isoloss.reduction.step": ("Denominators.on_host", "Step.__exit__", "Step.record", "Step.metrics"),
}
MICRO_BATCH_FUNCTIONS = {
    "isoloss.batch.packed_batch": (
        "PackedBatch.shard",
        "PackedBatch.to",
        "PackedBatch._map",
        "PackedBatch.model_inputs",
    ),
    "isoloss.batch.weighting": ("reduction_factors", "weigh_documents"),
    "isoloss.objectives.loss_model": ("LossModel.forward", "causal_lm", "logit_options"),
    "isoloss.reduction.gradients": ("GradientSum.synchronise", "GradientSum.saw_backward"),
    "isoloss.reduction.opening": ("channel_indices",),
    "isoloss.reduction.schema": ("VectorSchema.zeros", "VectorSchema.block"),
}
HOST_SYNCS = ("item", "tolist", "cpu", "numpy", "synchronize", "nonzero")
SYNCS_ON_HOST_TENSORS = {
    # rows with a target are listed on the CPU only, or in the reference that says so
    ("isoloss.losses.linear_cross_entropy.chunked", "nonzero"),
    ("isoloss.losses.linear_cross_entropy.reference", "nonzero"),
    ("isoloss.losses.linear_cross_entropy.problem", "nonzero"),
}


def _parse_package() -> dict[str, ast.Module]:
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ["isoloss", *path.relative_to(SOURCE).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = ast.parse(path.read_text(), str(path))
    return modules


MODULES = _parse_package()


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported anywhere; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the full name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _level(module: str) -> int:
    return next(level for unit, level in LEVELS.items() if _within(module, (unit,)))


def _package_imports(modules: Mapping[str, ast.Module], importer: str) -> Iterator[tuple[int, str]]:
    """Modules of the package that a module imports."""
    for line, name in _imports(modules[importer]):
        if not _within(name, ("isoloss",)):
            continue
        module = name if name in modules else name.rpartition(".")[0]
        yield line, module


# -- (a) import order


def upward_imports(modules: Mapping[str, ast.Module]) -> list[str]:
    """Imports of a higher level. `isoloss` itself names everything public, so nothing imports it."""
    found = []
    for importer in modules:
        if importer == "isoloss":
            continue
        for line, module in _package_imports(modules, importer):
            if importer in ("isoloss.cli", "isoloss.__main__") and module == "isoloss":
                continue  # its version
            if module == "isoloss" or _level(module) > _level(importer):
                found.append(f"{importer}:{line} imports {module}")
    return found


def import_cycles(modules: Mapping[str, ast.Module]) -> list[str]:
    """Cycles of imports, whatever their level, imports inside functions included."""
    graph = {
        importer: sorted({module for _, module in _package_imports(modules, importer)} - {importer})
        for importer in modules
        if importer != "isoloss"
    }
    finished: set[str] = set()
    found = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            found.append(" -> ".join((*path[path.index(module) :], module)))
        elif module not in finished:
            for imported in graph.get(module, []):
                visit(imported, (*path, module))
            finished.add(module)

    for module in graph:
        visit(module, ())
    return found


def foreign_imports(modules: Mapping[str, ast.Module]) -> list[str]:
    """Imports of the core other than torch and the standard library."""
    allowed = {*sys.stdlib_module_names, "torch", "isoloss"}
    return [
        f"{importer}:{line} imports {name}"
        for importer, tree in modules.items()
        if importer == "isoloss" or _level(importer) <= CORE_LEVEL
        for line, name in _imports(tree)
        if name.partition(".")[0] not in allowed | {OPTIONAL_IMPORTS.get(importer)}
    ]


def test_every_unit_has_a_level():
    for module in MODULES:
        assert module == "isoloss" or any(_within(module, (unit,)) for unit in LEVELS), (
            f"{module} has no level; enter it in LEVELS as DESIGN section 6 places it"
        )


def test_modules_import_downwards():
    assert upward_imports(MODULES) == []


def test_modules_import_without_cycles():
    assert import_cycles(MODULES) == []


def test_the_core_imports_torch_and_the_standard_library_alone():
    assert foreign_imports(MODULES) == []


def test_import_checks_find_planted_violations():
    planted = {
        "isoloss.topology": ast.parse("def f():\n    from isoloss.reduction import ledger"),
        "isoloss.reduction": ast.parse("import isoloss.batch"),
        "isoloss.reduction.ledger": ast.parse("from isoloss.reduction.step import Step\nimport numpy as np"),
        "isoloss.reduction.step": ast.parse("from isoloss import Term\nimport isoloss.reduction.ledger"),
        "isoloss.batch": ast.parse(""),
        "isoloss": ast.parse("import transformers"),
    }
    assert upward_imports(planted) == [
        "isoloss.topology:2 imports isoloss.reduction.ledger",
        "isoloss.reduction.step:1 imports isoloss",
    ]
    assert import_cycles(planted) == [
        "isoloss.reduction.ledger -> isoloss.reduction.step -> isoloss.reduction.ledger"
    ]
    assert foreign_imports(planted) == [
        "isoloss.reduction.ledger:2 imports numpy",
        "isoloss:1 imports transformers",
    ]


def test_a_loop_of_ones_own_runs_with_torch_alone():
    """A step runs where nothing but torch is installed, numpy included."""
    program = """
import sys
blocked = (
    "transformers", "pydantic", "datasets", "yaml", "rich", "jinja2", "numpy", "tensorboard", "triton"
)
sys.modules.update(dict.fromkeys(blocked))  # None: importing one raises ModuleNotFoundError
import warnings
warnings.simplefilter("ignore")  # torch mentions that numpy is missing
import torch, isoloss
layout = isoloss.Layout([3, 2], [0, 1])
ids = torch.arange(5)
batch = isoloss.PackedBatch(ids, {"text": isoloss.shift_targets(ids, layout)}, layout)
ledger = isoloss.Ledger([isoloss.Term("text")], channels=["code", "docs"])
head = torch.nn.Linear(4, 8)
with ledger.step([batch], gradients=isoloss.sum_gradients(head)) as step:
    for batch in step:
        step.loss(torch.randn(5, 4), head.weight, batch, bias=head.bias).backward()
isoloss.clip_grad_norm_(head, 1.0)
assert step.metrics()["tokens/loss"] == 3
assert all(sys.modules[name] is None for name in blocked)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# -- (b) who communicates


def communication(modules: Mapping[str, ast.Module]) -> list[str]:
    """Mentions of torch.distributed outside the modules that may communicate."""
    found = []
    for module, tree in modules.items():
        if _within(module, MAY_COMMUNICATE):
            continue
        names = [*_imports(tree), *((node.lineno, ast.unparse(node)) for node in _attributes(tree))]
        for line, name in names:
            mentions = _within(name, ("torch.distributed",)) or "_distributed_c10d" in name
            if mentions and not (module == "isoloss.cli" and _within(name, LAUNCHER)):
                found.append(f"{module}:{line} mentions {name}")
    return found


def rank_questions(modules: Mapping[str, ast.Module]) -> list[str]:
    """Questions for a rank or a world size outside topology.py."""
    return [
        f"{module}:{node.lineno} asks {_called(node)}"
        for module, tree in modules.items()
        if module != "isoloss.topology"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node) in RANK_QUESTIONS
    ]


def _attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def _called(call: ast.Call) -> str:
    """Last name of what is called, "" for the result of an expression."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def test_only_named_modules_communicate():
    assert communication(MODULES) == []


def test_only_the_topology_asks_for_ranks():
    assert rank_questions(MODULES) == []


def test_communication_checks_find_planted_violations():
    planted = {
        "isoloss.data.loader": ast.parse("import torch.distributed as dist\nrank = dist.get_rank()"),
        "isoloss.batch.layout": ast.parse("import torch\nd = torch.distributed"),
        "isoloss.losses.router": ast.parse("from torch import distributed"),
        "isoloss.cli": ast.parse(
            "from torch.distributed.launcher.api import elastic_launch\n"
            "from torch.distributed.tensor import DTensor"
        ),
        "isoloss.reduction.step": ast.parse("import torch.distributed as dist\ndist.get_world_size()"),
        "isoloss.topology": ast.parse("import torch.distributed as dist\ndist.get_rank()"),
    }
    assert communication(planted) == [
        "isoloss.data.loader:1 mentions torch.distributed",
        "isoloss.batch.layout:2 mentions torch.distributed",
        "isoloss.losses.router:1 mentions torch.distributed",
        "isoloss.cli:2 mentions torch.distributed.tensor.DTensor",
    ]
    assert rank_questions(planted) == [
        "isoloss.data.loader:2 asks get_rank",
        "isoloss.reduction.step:2 asks get_world_size",
    ]


# -- (c) soft contracts

_MUTATORS = frozenset(
    "append extend insert remove pop clear add discard update setdefault popitem appendleft popleft "
    "sort reverse intersection_update difference_update".split()
)
_MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MUTABLE_TYPES = ("list", "dict", "set", "defaultdict", "Counter", "OrderedDict", "deque", "bytearray")


def soft_contracts(module: str, tree: ast.AST) -> list[str]:
    """What lets a fault pass in silence, and state or settings that are looked up instead of passed."""
    found = []
    for node in ast.walk(tree):
        fault = ""
        if isinstance(node, ast.Call):
            name = _called(node) if isinstance(node.func, ast.Name) else ""
            if name == "hasattr" or (name == "getattr" and len(node.args) + len(node.keywords) > 2):
                fault = f"{name} with a way out"
            elif name == "print":
                fault = "print"
            elif _called(node) == "getenv":
                fault = "environment"
        elif isinstance(node, ast.Attribute) and node.attr in ("environ", "environb"):
            fault = "environment"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in ("environ", "getenv") for alias in node.names):
                fault = "environment"
        elif isinstance(node, ast.Global):
            fault = "global"
        elif isinstance(node, ast.ExceptHandler) and _is_broad(node):
            fault = "broad except"
        if fault and not (fault == "environment" and module == "isoloss.cli"):
            found.append(f"{module}:{node.lineno}: {fault}")
    return found


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it swallows any exception: one that ends by raising again swallows none."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)
    last = handler.body[-1]
    return broad and not (isinstance(last, ast.Raise) and last.exc is None)


def module_state(modules: Mapping[str, ast.Module]) -> list[str]:
    """Mutations of what stands at module level, in its own module or in one that imports it."""
    containers = set()
    for tree in modules.values():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                made = isinstance(node.value, _MUTABLE) or (
                    isinstance(node.value, ast.Call) and _called(node.value) in _MUTABLE_TYPES
                )
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if made:
                    containers |= {target.id for target in targets if isinstance(target, ast.Name)}
    found = []
    for module, tree in modules.items():
        for line, name in _mutations(tree):
            if name in containers and name not in _assigned_in_functions(tree):
                found.append(f"{module}:{line} changes {name}")
    return found


def _mutations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed: ast.expr = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in _MUTATORS:
                continue
            changed = node.func.value
        elif isinstance(node, ast.AugAssign):
            changed = node.target
        else:
            continue
        if isinstance(changed, ast.Attribute):  # module.NAME
            yield node.lineno, changed.attr
        elif isinstance(changed, ast.Name):
            yield node.lineno, changed.id


def _assigned_in_functions(tree: ast.AST) -> set[str]:
    """Local names, which hide those of the module."""
    return {
        name.id
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in ast.walk(function)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def test_no_soft_contracts():
    assert [fault for module, tree in MODULES.items() for fault in soft_contracts(module, tree)] == []


def test_no_state_at_module_level():
    assert module_state(MODULES) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("hasattr(model, 'head')", "hasattr with a way out"),
        ("getattr(model, 'head', None)", "getattr with a way out"),
        ("print('step')", "print"),
        ("import os\nrank = os.environ['RANK']", "environment"),
        ("import os\nrank = os.getenv('RANK')", "environment"),
        ("from os import environ", "environment"),
        ("def f():\n    global step\n    step = 1", "global"),
        ("try:\n    f()\nexcept Exception:\n    pass", "broad except"),
        (
            "try:\n    f()\nexcept (ValueError, BaseException) as e:\n    raise RuntimeError from e",
            "broad except",
        ),
        ("try:\n    f()\nexcept:\n    pass", "broad except"),
    ],
)
def test_soft_contracts_are_found(source, fault):
    [found] = soft_contracts("isoloss.batch.layout", ast.parse(source))
    assert found.endswith(f": {fault}")


@pytest.mark.parametrize(
    "source",
    [
        "getattr(model, name)",
        "try:\n    f()\nexcept BaseException:\n    undo()\n    raise",
        "try:\n    f()\nexcept ValueError:\n    pass",
        "printer.print('x')",
    ],
)
def test_what_is_allowed_is_not_found(source):
    assert soft_contracts("isoloss.batch.layout", ast.parse(source)) == []


def test_module_state_is_found():
    planted = {
        "isoloss.a": ast.parse(
            "REGISTRY = {}\nSEEN: set[str] = set()\nORDER = ['x']\n"
            "def f(name):\n    REGISTRY[name] = 1\n    SEEN.add(name)\n    return ORDER[0]"
        ),
        "isoloss.b": ast.parse("from isoloss import a\na.ORDER.append('y')\nlocal = []\nlocal2 = 3"),
        "isoloss.c": ast.parse("def f():\n    ORDER = []\n    ORDER.append(1)\n    return ORDER"),
    }
    assert module_state(planted) == [
        "isoloss.a:5 changes REGISTRY",
        "isoloss.a:6 changes SEEN",
        "isoloss.b:2 changes ORDER",
    ]


# -- (d) the micro-batch path does not wait for the device


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods with their qualified names; nested functions belong to the outer one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def host_syncs(modules: Mapping[str, ast.Module]) -> list[str]:
    """Calls in the micro-batch path that make the host wait for a device. See [Note: micro-batch path]."""
    found = []
    for module, tree in modules.items():
        if _within(module, MICRO_BATCH_MODULES):
            outside = OUTSIDE_THE_LOOP.get(module, ())
            parts = [node for name, node in _functions(tree) if name not in outside]
        else:
            wanted = MICRO_BATCH_FUNCTIONS.get(module, ())
            parts = [node for name, node in _functions(tree) if name in wanted]
        for node in (node for part in parts for node in ast.walk(part)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                moves = name == "to" and any(
                    isinstance(value, ast.Constant) and value.value == "cpu" for value in node.args
                )
                allowed = (module, name) in SYNCS_ON_HOST_TENSORS
                if (name in HOST_SYNCS or moves) and not allowed:
                    found.append(f"{module}:{node.lineno} calls .{name}")
    return found


def test_row_1_the_micro_batch_path_does_not_wait_for_the_device():
    """row 1"""
    assert host_syncs(MODULES) == []


def test_the_lists_of_the_micro_batch_path_name_what_exists():
    """A function that was renamed must not leave the path unseen."""
    for names_by_module in (MICRO_BATCH_FUNCTIONS, OUTSIDE_THE_LOOP):
        for module, names in names_by_module.items():
            existing = {name for name, _ in _functions(MODULES[module])}
            assert existing >= set(names), f"{module} lost {set(names) - existing}; correct the list"
    for prefix in MICRO_BATCH_MODULES:
        assert any(_within(module, (prefix,)) for module in MODULES), f"{prefix} is gone; correct the list"


def test_host_syncs_are_found():
    planted = {
        "isoloss.parallel.attention": ast.parse("def f(x):\n    return x.sum().item()"),
        "isoloss.reduction.step": ast.parse(
            "class Step:\n"
            "    def loss(self, x):\n        return x.cpu()\n"
            "    def add(self, x):\n        def g():\n            return x.tolist()\n        return g\n"
            "    def __iter__(self):\n        yield self.x.to('cpu')\n"
            "    def metrics(self):\n        return self.x.item()\n"
            "    def new(self):\n        return self.x.numpy()\n"
        ),
    }
    assert host_syncs(planted) == [
        "isoloss.parallel.attention:2 calls .item",
        "isoloss.reduction.step:3 calls .cpu",
        "isoloss.reduction.step:6 calls .tolist",
        "isoloss.reduction.step:9 calls .to",
        "isoloss.reduction.step:13 calls .numpy",
    ]
