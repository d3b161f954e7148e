"""The shape of the code: layers, sizes, names (DESIGN section 4, STYLE).

Each rule maps a module to the sentences that it violates.
The samples at the end show that each can fail.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Imports point down only. Within a level nobody imports a sibling; a package's own modules may
# import each other.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"cli"}),
    frozenset({"integrations"}),  # offload-train --auto
    frozenset({"engine"}),
    frozenset({"checkpoint", "interchange"}),  # the facade delegates to them
    frozenset({"runtime", "optim"}),
    frozenset({"schedule", "store", "memory", "masters"}),
    frozenset({"partition"}),
    frozenset({"config", "crc", "deepspeed_config", "metrics", "kernels", "profile", "threads"}),
    frozenset({"choices", "errors"}),
)
RANK = {name: rank for rank, names in enumerate(LEVELS) for name in names}
PURE = ("offload.partition", "offload.schedule")
PURE_FORBIDS = (
    *("torch", "aio", "_offload_native", "os", "io", "pathlib", "mmap", "shutil", "tempfile"),
    *("subprocess", "socket", "threading", "ctypes", "time"),
)
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|managers?|handlers?|misc)($|_)")

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 40
MAX_POSITIONAL = 5
MAX_METHODS = 15
MAX_FACADE_METHODS = 28
MAX_ATTRIBUTES = 12
FACADE = "OffloadEngine"


@dataclass(frozen=True)
class Module:
    """A source file; `name` is its dotted path from the root of the repository."""

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def code_lines(self) -> frozenset[int]:
        """Lines that hold code: no blank lines, comments or docstrings."""
        skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type not in skip and token.type != tokenize.ENDMARKER:
                lines.update(range(token.start[0], token.end[0] + 1))
        for text in docstrings(self.tree):
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        return frozenset(lines)

    def num_code_lines(self, node: ast.stmt) -> int:
        return len(self.code_lines & set(range(node.lineno, (node.end_lineno or 0) + 1)))

    def is_in(self, package: str) -> bool:
        return self.name == package or self.name.startswith(package + ".")


def docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            yield first.value


def imports(module: Module) -> Iterator[str]:
    """Dotted names that the module imports anywhere, relative ones resolved."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".") + [""] * module.is_package
                parents = package[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            # `from offload import store` and `from offload.store import extents` name one layer.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def classes(module: Module) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def calls_of(name: str, module: Module) -> Iterator[ast.Call]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def layer_of(dotted: str) -> str | None:
    """`offload.store.format` -> `store`; None for other packages and for `offload` itself."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "offload" and len(parts) > 1 else None


def imports_point_down(module: Module) -> Iterator[str]:
    own = layer_of(module.name)
    if own is None:
        return  # `offload/__init__.py` collects the public surface
    if own not in RANK:
        yield f"{own} has no place among the layers"
        return
    for name in imports(module):
        other = layer_of(name)
        if name == "offload" or (other is not None and other not in RANK):
            yield f"imports {name}: name the module that defines it"
        elif other is not None and other != own and RANK[other] <= RANK[own]:
            yield f"imports {name}: {own} may import only what lies below it"


def aio_stands_alone(module: Module) -> Iterator[str]:
    if module.is_in("aio"):
        for name in imports(module):
            if name.split(".")[0] in ("torch", "offload"):
                yield f"imports {name}: aio knows neither torch nor offload"


def pure_layers_do_no_io(module: Module) -> Iterator[str]:
    if not any(module.is_in(package) for package in PURE):
        return
    for name in imports(module):
        if name.split(".")[0] in PURE_FORBIDS:
            yield f"imports {name}: this layer is integers and frozen dataclasses"
    for node in calls_of("open", module):
        yield f"line {node.lineno}: opens a file"


def modules_stay_small(module: Module) -> Iterator[str]:
    if len(module.code_lines) > MAX_MODULE_LINES:
        yield f"{len(module.code_lines)} code lines, at most {MAX_MODULE_LINES}"


def functions_stay_short(module: Module) -> Iterator[str]:
    if module.is_in("tests"):
        return
    for node in functions(module):
        lines = module.num_code_lines(node)
        if lines > MAX_FUNCTION_LINES:
            yield f"{node.name}: {lines} code lines, at most {MAX_FUNCTION_LINES}"


def functions_take_few_positional_parameters(module: Module) -> Iterator[str]:
    if module.is_in("tests"):
        return
    for node in functions(module):
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        if names[:1] in (["self"], ["cls"]):
            del names[0]
        if len(names) > MAX_POSITIONAL:
            yield f"{node.name}: {len(names)} positional parameters, at most {MAX_POSITIONAL}"


def classes_have_few_methods(module: Module) -> Iterator[str]:
    for node in classes(module):
        most = MAX_FACADE_METHODS if node.name == FACADE else MAX_METHODS
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        if len(methods) > most:
            yield f"{node.name}: {len(methods)} methods, at most {most}"


def classes_have_few_attributes(module: Module) -> Iterator[str]:
    for node in classes(module):
        names = attributes(node)
        if not is_frozen(node) and len(names) > MAX_ATTRIBUTES:
            yield f"{node.name}: {len(names)} attributes, at most {MAX_ATTRIBUTES}"


def is_frozen(node: ast.ClassDef) -> bool:
    """A frozen dataclass is a value: a record may have many fields, since none of them changes."""
    return any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields of the class body and everything that a method assigns on `self`."""
    names = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in ast.walk(node):
        stored = isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        if stored and isinstance(item.value, ast.Name) and item.value.id == "self":
            names.add(item.attr)
    return names


def names_say_something(module: Module) -> Iterator[str]:
    for part in module.name.split("."):
        if FORBIDDEN_NAMES.search(part):
            yield f"{part}: a name that says nothing"


def nothing_prints(module: Module) -> Iterator[str]:
    if not (module.is_in("aio") or module.is_in("offload")):
        return
    for node in calls_of("print", module):
        yield f"line {node.lineno}: prints; log, or click.echo in the cli"


def nothing_is_left_to_do(module: Module) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
            yield f"line {token.start[0]}: {token.string}"


RULES: tuple[Callable[[Module], Iterator[str]], ...] = (
    imports_point_down,
    aio_stands_alone,
    pure_layers_do_no_io,
    modules_stay_small,
    functions_stay_short,
    functions_take_few_positional_parameters,
    classes_have_few_methods,
    classes_have_few_attributes,
    names_say_something,
    nothing_prints,
    nothing_is_left_to_do,
)


def source_modules() -> list[Module]:
    found = []
    for top in ("aio", "offload", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Callable[[Module], Iterator[str]]) -> None:
    broken = [f"{module.name}: {text}" for module in source_modules() for text in rule(module)]
    assert not broken, "\n" + "\n".join(broken)


def test_a_relative_import_in_a_package_is_resolved_from_the_package_itself() -> None:
    source = "from .format import HEADER\nfrom ..memory import pool"
    names = list(imports(Module("offload.store", source, is_package=True)))
    assert names == ["offload.store.format.HEADER", "offload.memory.pool"]


def test_the_search_finds_every_package() -> None:
    tops = {module.name.split(".")[0] for module in source_modules()}
    assert {"aio", "offload", "tests"} <= tops


def test_no_two_test_modules_share_a_name() -> None:
    """pytest imports them by their last name: the second of two would stop the whole run."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def body(num_lines: int) -> str:
    return "def long():\n" + "    x = 1\n" * (num_lines - 1)


def methods(name: str, count: int) -> str:
    return f"class {name}:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(count))


def fields(decorator: str, count: int) -> str:
    return f"{decorator}\nclass A:\n" + "".join(f"    f{i}: int\n" for i in range(count))


def assigned(count: int) -> str:
    stores = "".join(f"        self.a{i} = 0\n" for i in range(count))
    return f"class A:\n    def __init__(self):\n{stores}"


VIOLATIONS = [
    (imports_point_down, "offload.partition.unit", "import offload.store"),
    (imports_point_down, "offload.store.extents", "from offload.memory import pool"),
    (imports_point_down, "offload.store.extents", "from offload import memory"),
    (imports_point_down, "offload.store.extents", "def f():\n    from ..runtime import hooks"),
    (imports_point_down, "offload.runtime.hooks", "from offload import OffloadEngine"),
    (imports_point_down, "offload.runtime.hooks", "import offload"),
    (imports_point_down, "offload.errors", "from offload.config import Config"),
    (imports_point_down, "offload.elsewhere", ""),
    (aio_stands_alone, "aio.queue", "import torch"),
    (aio_stands_alone, "aio.queue", "from offload.errors import OffloadError"),
    (pure_layers_do_no_io, "offload.schedule.plan", "import torch.nn"),
    (pure_layers_do_no_io, "offload.partition.unit", "from pathlib import Path"),
    (pure_layers_do_no_io, "offload.partition.unit", "open('x')"),
    (modules_stay_small, "offload.store.extents", "x = 1\n" * (MAX_MODULE_LINES + 1)),
    (functions_stay_short, "offload.store.extents", body(MAX_FUNCTION_LINES + 1)),
    (functions_take_few_positional_parameters, "aio.a", "def f(self, a, b, c, d, e, f): ..."),
    (functions_take_few_positional_parameters, "aio.a", "def f(a, b, c, /, d, e, f): ..."),
    (classes_have_few_methods, "aio.a", methods("A", MAX_METHODS + 1)),
    (classes_have_few_methods, "offload.engine", methods(FACADE, MAX_FACADE_METHODS + 1)),
    (classes_have_few_attributes, "aio.a", assigned(MAX_ATTRIBUTES + 1)),
    (classes_have_few_attributes, "aio.a", fields("@dataclass", MAX_ATTRIBUTES + 1)),
    (names_say_something, "offload.runtime.utils", ""),
    (names_say_something, "offload.io_helpers.files", ""),
    (nothing_prints, "offload.cli.main", "print('x')"),
    (nothing_is_left_to_do, "aio.a", "x = 1  # TO" "DO: more"),
]  # fmt: skip

ALLOWED = [
    (
        imports_point_down,
        "offload.engine",
        "import torch\nfrom offload.runtime.hooks import attach",
    ),
    (imports_point_down, "offload.store.extents", "from offload.store.format import HEADER"),
    (imports_point_down, "offload.store.extents", "from .format import HEADER"),
    (imports_point_down, "offload", "from offload.engine import OffloadEngine"),
    (aio_stands_alone, "offload.store.extents", "import aio, torch"),
    (pure_layers_do_no_io, "offload.runtime.hooks", "import torch\nopen('x')"),
    (
        modules_stay_small,
        "aio.a",
        '"""' + "text\n" * 600 + '"""\n' + "# x\n" * 600 + "x = 1\n" * 500,
    ),
    (functions_stay_short, "aio.a", body(MAX_FUNCTION_LINES)),
    (functions_take_few_positional_parameters, "aio.a", "def f(self, a, b, c, d, e, *, f, g): ..."),
    (classes_have_few_methods, "aio.a", methods("A", MAX_METHODS)),
    (classes_have_few_methods, "offload.engine", methods(FACADE, MAX_FACADE_METHODS)),
    (classes_have_few_attributes, "aio.a", assigned(MAX_ATTRIBUTES)),
    (classes_have_few_attributes, "aio.a", fields("@dataclass(frozen=True)", 30)),
    (names_say_something, "offload.runtime.commonplace", ""),
    (nothing_prints, "examples.train_lm", "print('x')"),
    (nothing_is_left_to_do, "aio.a", "x = 'TO' 'DO'"),
]


@pytest.mark.parametrize(("rule", "name", "source"), VIOLATIONS)
def test_a_rule_sees_what_breaks_it(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    assert list(rule(Module(name, source)))


@pytest.mark.parametrize(("rule", "name", "source"), ALLOWED)
def test_a_rule_lets_the_rest_through(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    assert not list(rule(Module(name, source)))


def test_every_rule_has_a_sample_that_breaks_it_and_one_that_does_not() -> None:
    for samples in (VIOLATIONS, ALLOWED):
        assert {rule for rule, _, _ in samples} == set(RULES)
