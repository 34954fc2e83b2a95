"""The rules of the house, checked by reading every file's imports: which folders may import which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
FILES = {
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(SOURCE.rglob("*.py"))
}

# What core may take from the standard library: nothing that does I/O, tells the time or runs beside it.
PURE = {
    "__future__",
    "array",
    "abc",
    "bisect",
    "contextlib",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "re",
    "reprlib",
    "statistics",
    "struct",
    "typing",
    "hashlib",
    "zlib",
}

# What each part of the package may import of the package. A part not listed here may import anything but the top.
MAY_IMPORT = {
    "core": {"core"},
    "engine": {"engine", "core"},
    "routing": {"routing", "core.errors"},
    "ops": {"ops", "core.errors"},
    "json_file": {"core.errors"},
    "models": {"models", "ops", "core.errors", "core.values", "json_file"},
    "text": {"text", "core", "json_file"},
    "report": {"report", "core.words"},
    "traffic": {"traffic", "core.errors", "core.values", "core.words"},
    "costs": {"costs", "report", "traffic", "engine", "core", "models", "ops"},
    "execution": {"execution", "costs", "engine", "core", "models", "ops", "json_file"},
    "simulation": {"simulation", "json_file", "routing", "costs", "report", "traffic", "engine", "core"},
    "evaluation": {
        "evaluation",
        "report",
        "offline.llm",
        "offline.vocabulary",
        "execution.build",
        "core",
        "models",
        "ops",
    },
    "offline": {"offline", "openai", "cluster.tensor_parallel", "execution", "engine", "core", "models", "text"},
    "openai": {"openai", "core", "text"},
    "apis": {"apis", "openai", "core"},
    "gateway": {"gateway", "cluster.kv_transfer.wire", "serving", "routing", "apis", "openai", "core"},
    "serving": {
        "serving",
        "routing",
        "apis",
        "openai",
        "offline.defaults",
        "offline.vocabulary",
        "engine",
        "core",
        "models",
        "text",
        "execution.build",
        "execution.exchange",
        "cluster.tensor_parallel.build",
        "cluster.tensor_parallel.remote",
        "cluster.kv_store",
        "cluster.kv_transfer",
    },
}
TOP = (
    "bench",
    "evaluation",
    "simulation",
    "serving",
    "gateway",
    "cluster.ray",
    "cli",
    "commands",
    "__main__",
)  # they import the rest; nothing below imports them

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
LONGEST_FILE = 450


@cache
def nodes_of(module: str) -> list[ast.AST]:
    """Every import, call, attribute and keyword in a file."""
    file = FILES[module]
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.keyword)
    return [node for node in ast.walk(ast.parse(file.read_text(), file)) if isinstance(node, kinds)]


@cache
def imports_of(module: str) -> list[str]:
    return list(find_imports(module))


def find_imports(module: str) -> Iterator[str]:
    """Every module that a file imports, wherever in it, relative ones resolved, each name of a `from` as its own."""
    file = FILES[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from chairlift.core import request` names a module; `from chairlift.core.request import Phase` no.
                yield name if (name := f"{source}.{alias.name}") in FILES else source


def ours_in(module: str) -> list[str]:
    """What a file imports of the package, without the package's own name."""
    return [name.removeprefix("chairlift.") for name in imports_of(module) if name.startswith("chairlift.")]


def foreign_in(module: str) -> set[str]:
    """The packages of others that a file imports."""
    return {name.partition(".")[0] for name in imports_of(module)} - {"chairlift"}


def is_within(name: str, parts: set[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def modules_of(*parts: str) -> list[str]:
    found = [module for module in FILES if part_of(module) in parts]
    assert found, f"no file in {parts}: has it moved?"
    return found


def test_the_imports_of_a_file_are_all_found() -> None:
    assert "chairlift.core.scheduler" in FILES
    assert {"core.scheduler", "core.plan", "core.request"} <= set(ours_in("chairlift.engine.engine"))
    assert "torch" in foreign_in("chairlift.execution.executor")
    assert "offline.llm" in ours_in("chairlift"), "also inside functions"


@pytest.mark.parametrize("module", modules_of("core", "routing"))
def test_core_and_routing_import_only_pure_parts_of_the_standard_library_and_their_own(module: str) -> None:
    assert foreign_in(module) <= PURE
    assert [name for name in ours_in(module) if not is_within(name, {"core", part_of(module)})] == []


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_go_one_way(part: str) -> None:
    wrong = {
        module: bad
        for module in modules_of(part)
        if (bad := [name for name in ours_in(module) if not is_within(name, MAY_IMPORT[part])])
    }
    assert wrong == {}


def test_ranks_stand_on_execution_alone() -> None:
    may = {
        "cluster.tensor_parallel",
        "cluster.parent",
        "cluster.kv_transfer.wire",
        "execution",
        "engine.garbage",
        "core",
        "models.division",
    }
    for module in modules_of("cluster"):
        if module.startswith("chairlift.cluster.tensor_parallel"):
            assert [name for name in ours_in(module) if not is_within(name, may)] == [], module


@pytest.mark.parametrize(
    "package", ["starlette", *(pytest.param(name, marks=pytest.mark.long) for name in ("msgspec", "zmq", "uvicorn"))]
)
def test_an_llm_of_one_rank_needs_no_package_of_servers(package: str) -> None:
    """A GPU box may have torch and little else."""
    code = f"import sys, chairlift.offline.llm; sys.exit('{package}' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_nobody_below_the_top_imports_it() -> None:
    below = [module for module in FILES if not is_within(module.removeprefix("chairlift."), {*TOP, "chairlift"})]
    wrong = {
        module: bad for module in below if (bad := [name for name in ours_in(module) if is_within(name, set(TOP))])
    }
    assert wrong == {}


def circles() -> list[set[str]]:
    """The sets of modules that import each other, directly or through others."""
    following = {module: {name for name in imports_of(module) if name in FILES} - {module} for module in FILES}
    reached: dict[str, set[str]] = {}
    for module in FILES:
        found, ahead = set[str](), [module]
        while ahead:
            new = following[ahead.pop()] - found
            found |= new
            ahead += new
        reached[module] = found
    tied = {frozenset({module, *(name for name in reached[module] if module in reached[name])}) for module in FILES}
    return sorted((set(each) for each in tied if len(each) > 1), key=sorted)


def test_no_two_modules_import_each_other() -> None:
    assert circles() == [], "also inside functions and for types alone: share data that both import, not each other"


@pytest.mark.parametrize("module", [module for module in modules_of("ops") if module.endswith("_cuda")])
def test_kernels_import_data_and_nothing_that_chooses_between_kernels(module: str) -> None:
    used = {f"chairlift.{name}" for name in ours_in(module) if not name.endswith("_cuda")}
    assert {name: ours_in(name) for name in used if any(each.endswith("_cuda") for each in ours_in(name))} == {}


@pytest.mark.parametrize("module", modules_of("ops", "models"))
def test_ops_and_models_know_nothing_of_requests(module: str) -> None:
    secrets = {"core.request", "core.plan", "core.scheduler", "engine", "execution"}
    assert [name for name in ours_in(module) if is_within(name, secrets)] == []


@pytest.mark.parametrize("module", modules_of("execution"))
def test_executors_know_steps_and_nothing_of_requests(module: str) -> None:
    secrets = {"core.request", "core.plan"}
    assert [name for name in ours_in(module) if is_within(name, secrets)] == []


@pytest.mark.parametrize("module", modules_of("text"))
def test_text_needs_neither_torch_nor_a_model(module: str) -> None:
    assert "torch" not in foreign_in(module)
    assert [name for name in ours_in(module) if is_within(name, {"models", "execution", "engine"})] == []


@pytest.mark.parametrize(
    "module", ["serving.server", "serving.workers", "gateway.run", "serving.text_process", "text.template_process"]
)
def test_processes_without_a_model_load_no_torch(module: str) -> None:
    """Torch takes two seconds and 200 MB."""
    code = f"import sys, chairlift.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("module", modules_of("engine"))
def test_the_engine_needs_no_torch(module: str) -> None:
    assert foreign_in(module).isdisjoint({"torch", "numpy"})


@pytest.mark.parametrize("module", FILES)
def test_nothing_runs_code_that_it_read(module: str) -> None:
    assert foreign_in(module).isdisjoint(UNSAFE_MODULES)
    for node in nodes_of(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in UNSAFE_CALLS, f"line {node.lineno} calls {node.func.id}()"
        if isinstance(node, ast.Attribute):
            is_torch_load = node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "torch"
            assert not is_torch_load, f"line {node.lineno} uses torch.load, which unpickles"
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            assert "load" not in {alias.name for alias in node.names}, f"line {node.lineno} imports torch.load"
        if isinstance(node, ast.keyword):
            assert node.arg not in ("allow_pickle", "weights_only"), f"line {node.value.lineno} is about pickles"


@pytest.mark.parametrize("module", FILES)
def test_a_file_is_short_enough_to_be_one_idea(module: str) -> None:
    assert len(FILES[module].read_text().splitlines()) < LONGEST_FILE


@pytest.mark.parametrize(
    "module",
    [
        "core.scheduler",
        "engine.engine",
        "costs.scheduler",
        "simulation.cache",
        "simulation.run",
        "traffic.mixes",
        "report.tables",
    ],
)
def test_the_core_comes_without_torch_or_numpy(module: str) -> None:
    asked = f"import sys, chairlift.{module}; print(sorted({{'torch', 'numpy', 'numba'}} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_every_module_is_in_the_map() -> None:
    """ARCHITECTURE.md names every module under its folder, but those of folders with a file for each of one kind."""
    tree = (SOURCE.parent / "ARCHITECTURE.md").read_text().partition("## The house")[2].partition("\n## ")[0]
    folders = dict(re.findall(r"^ {6}(\w+)/(.*(?:\n {8}.*)*)", tree, re.MULTILINE))
    alike = {"commands", "families", "formats", "parsers", "peers"}
    missing = [
        str(file.relative_to(SOURCE))
        for file in [*FILES.values(), *SOURCE.rglob("*.js")]
        if not file.name.startswith("__") and file.parent.name not in alike and file.parent.name != "chairlift"
        if not re.search(rf"\b{re.escape(file.name)}", folders[file.relative_to(SOURCE).parts[1]])
    ]
    assert missing == []
