"""The house rules that a reader relies on: who may import whom, what is written down, what never appears."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks.layout import entries, import_circles, module_name, parse, python_files
from policies.extras import SECOND_STEP

REPOSITORY = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "policies": {"policies"},
    "envs": {"envs", "policies", "assets"},
    "algos": {"algos", "envs", "policies"},
    "burnish": {"burnish", "algos", "envs", "policies", "configs", "assets"},
    "configs": set(),
    "assets": set(),
}
"""Package -> the packages of ours that it may use; assets and configs are data that know nobody."""

NOT_OURS = {"tests", "benchmarks"}
IMPORTED_AS = {"pyzmq": "zmq", "pytest-xdist": "xdist", "ipython": "IPython", "warp-lang": "warp"}
"""Distributions whose module has another name."""


def packages_of_extras() -> set[str]:
    """Return the modules that only an extra installs, those of its second step included."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = [*project["optional-dependencies"].values(), *SECOND_STEP.values()]
    names = {Requirement(text).name for texts in optional for text in texts}
    names -= {"burnish", *(Requirement(text).name for text in project["dependencies"])}
    names.add("numba")  # robosuite brings it
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


EXTRAS = packages_of_extras()
"""Packages of the extras: imported where they are used, never while a module is imported."""

HEAVY = {
    *("mujoco", "gymnasium", "hydra", "omegaconf", "matplotlib", "diffusers", "h5py", "rich"),
    *("onnx", "onnxruntime", "ogbench", "dm_control", "torch._dynamo"),
}
"""Packages that running a policy does not need."""

MODULES = python_files(*MAY_IMPORT)


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def offenders(found: Callable[[Path, ast.Module], Any]) -> dict[str, Any]:
    """Return what a law finds wrong in a module, by file; files without a finding are left out."""
    findings = ((name_of(path), found(path, parse(path))) for path in MODULES)
    return {name: wrong for name, wrong in findings if wrong}


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the top packages of import statements; "." stands for a relative import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else (node.module or "").partition(".")[0])
    return found


def run_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported: those in functions do not."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.ExceptHandler | ast.match_case):
                yield from run_on_import(inner.body)
            elif isinstance(inner, ast.stmt):
                yield from run_on_import([inner])


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a module; several laws look at each."""
    return list(ast.walk(tree))


def calls(tree: ast.Module, is_wanted: Callable[[ast.Call], bool]) -> list[int]:
    """Return the lines of the calls that `is_wanted` picks."""
    return [node.lineno for node in nodes(tree) if isinstance(node, ast.Call) and is_wanted(node)]


def called(call: ast.Call, names: set[str]) -> tuple[str, str]:
    """Return what a function is taken from, and its name, if that is one of `names`, else two empty texts."""
    func = call.func
    if isinstance(func, ast.Name):
        return "", func.id if func.id in names else ""
    if isinstance(func, ast.Attribute) and func.attr in names:
        return ast.unparse(func.value), func.attr
    return "", ""


# -- imports --------------------------------------------------------------------------------------------


def test_imports_point_one_way() -> None:
    guarded = {*MAY_IMPORT, *NOT_OURS, "."}

    def forbidden(path: Path, tree: ast.Module) -> set[str]:
        package = path.relative_to(REPOSITORY).parts[0]
        return (imported(nodes(tree)) & guarded) - MAY_IMPORT[package]

    assert not offenders(forbidden)


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = python_files(*MAY_IMPORT, "benchmarks")
    assert not import_circles({module_name(path): parse(path) for path in files})


@pytest.mark.parametrize(
    ("one", "two", "is_circle"),
    [
        ("import p.two", "import p.one", True),
        ("from p import two", "def late():\n    from p.one import name", True),
        ("from p.two import name", "if TYPE_CHECKING:\n    from p import one", True),
        ("from p import two", "from p import name", False),
        ("from p import two", "", False),
    ],
)
def test_a_circle_is_found_however_it_is_closed(one: str, two: str, is_circle: bool) -> None:
    sources = {"p": "", "p.one": one, "p.two": two}
    found = import_circles({name: ast.parse(code) for name, code in sources.items()})
    assert found == ([["p.one", "p.two"]] if is_circle else [])


@pytest.mark.parametrize(("package", "most"), [("policies", 26), ("algos", 24), ("envs", 8), ("burnish", 12)])
def test_the_top_of_a_package_is_seen_at_a_glance(package: str, most: int) -> None:
    """Modules and rooms: the first thing that a reader looks through."""
    assert len(entries(package)) <= most, entries(package)


def test_optional_packages_are_imported_where_they_are_used() -> None:
    assert not offenders(lambda path, tree: imported(run_on_import(tree.body)) & EXTRAS)


def test_the_extras_are_those_of_the_project() -> None:
    assert {
        "onnx",
        "zmq",
        "dm_control",
        "metaworld",
        "imageio",
        "robomimic",
        "gym",
        "minari",
    } <= EXTRAS
    assert not EXTRAS & {"burnish", "mujoco", "torch"}


@pytest.mark.parametrize(
    ("code", "runs"),
    [
        ("import minari", True),
        ("try:\n    import minari\nexcept ImportError:\n    minari = None", True),
        ("try:\n    import json\nexcept ImportError:\n    from minari import data", True),
        ("if True:\n    pass\nelse:\n    with open(''):\n        import minari", True),
        ("class Reader:\n    import minari", True),
        ("if TYPE_CHECKING:\n    import minari", False),
        ("def read():\n    import minari", False),
        ("class Reader:\n    def read(self):\n        import minari", False),
    ],
)
def test_an_import_is_found_wherever_it_runs_with_its_module(code: str, runs: bool) -> None:
    assert ("minari" in imported(run_on_import(ast.parse(code).body))) is runs


def test_running_a_policy_loads_no_simulator_and_no_front_end() -> None:
    """The package, every module of it, and loading, one after another in one process."""
    found = f"print(sorted({HEAVY | (set(MAY_IMPORT) - {'policies'})} & set(sys.modules)))"
    check = [
        "import sys, policies",
        found,
        "from policies.registry import parts",
        "[parts(group) for group in ('process', 'sampler', 'backbone')]",
        found,
        "from policies.storage.policy_folder import load_policy",
        "load_policy('tests/fixtures/version_0_1/policies/cloned')",
        found,
    ]
    command = [sys.executable, "-c", "\n".join(check)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]"] * 3


# -- what never appears ---------------------------------------------------------------------------------


def is_print(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "print"


def test_nothing_prints_behind_the_console_s_back() -> None:
    assert not offenders(lambda path, tree: calls(tree, is_print))


DRAWS = {"randn", "rand", "randint", "randperm", "normal", "multinomial", "bernoulli", "poisson"}
DRAWS_LIKE = {"randn_like", "rand_like", "randint_like"}
DRAWING_METHODS = {
    *("normal_", "uniform_", "bernoulli", "bernoulli_", "random_", "exponential_", "log_normal_"),
    *("geometric_", "cauchy_"),
}
"""Of tensors."""
NUMPY_DRAWS = {"seed", "uniform", "choice", "shuffle", "permutation", "random", "standard_normal"}


SEEDED = {"default_rng", "RandomState", "SeedSequence"}
"""Of numpy: what they draw without a seed, nobody draws again."""

INITIAL_WEIGHTS = {"policies/networks/critics.py", "algos/rebrac.py"}
"""Modules that draw initial weights in place, as layers of torch do; see `policies.seeds.seeded_weights`."""


def is_given(call: ast.Call, name: str, *, at: int | None = None) -> bool:
    """Tell whether a call has an argument, by name or by place, that is not literally None."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == name]
    given += call.args[at : at + 1] if at is not None else []
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)


def draws_from_global_state(call: ast.Call) -> bool:
    """Tell whether a call draws numbers that no argument decides."""
    module, function = called(call, DRAWS | NUMPY_DRAWS | SEEDED | DRAWS_LIKE)
    if module == "torch" and function in DRAWS:
        return not is_given(call, "generator")
    if function in SEEDED:
        return not is_given(call, "seed", at=0)
    is_legacy = module in ("np.random", "numpy.random") and function in DRAWS | NUMPY_DRAWS
    return is_legacy or (module == "torch" and function in DRAWS_LIKE)


def draws_in_place(call: ast.Call) -> bool:
    """Tell whether a call is a method of a tensor that draws from the global state; `nn.init` is exempt."""
    module, _ = called(call, DRAWING_METHODS)
    is_method = bool(module) and module != "torch" and module.rpartition(".")[2] != "init"
    return is_method and not is_given(call, "generator")


def test_random_numbers_come_from_an_argument() -> None:
    assert not offenders(lambda path, tree: calls(tree, draws_from_global_state))
    assert not offenders(lambda path, tree: imported(nodes(tree)) & {"random"})
    assert set(offenders(lambda path, tree: calls(tree, draws_in_place))) == INITIAL_WEIGHTS


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("torch.randn(3)", True),
        ("torch.randn(3, generator=None)", True),
        ("torch.randn(3, generator=g)", False),
        ("torch.poisson(x)", True),
        ("torch.randn_like(x)", True),
        ("x.normal_()", True),
        ("torch.empty(3).uniform_(0, 1)", True),
        ("x.uniform_(0, 1, generator=g)", False),
        ("x.bernoulli(0.5)", True),
        ("nn.init.normal_(x)", False),
        ("np.random.default_rng()", True),
        ("np.random.default_rng(None)", True),
        ("np.random.default_rng(3)", False),
        ("default_rng(seed=seed)", False),
        ("np.random.RandomState()", True),
        ("np.random.normal()", True),
        ("generator.normal()", False),
    ],
)
def test_draws_that_no_argument_decides_are_found(code: str, is_found: bool) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert (draws_from_global_state(call) or draws_in_place(call)) is is_found


def streams(path: Path) -> Iterator[str]:
    """Yield the names of the random streams that a module draws from."""
    drawing = ("derive_seed", "seeded_generator")
    for node in nodes(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in drawing:
            yield ast.unparse(node.args[1])


def test_every_stream_of_random_numbers_is_drawn_from_in_one_place() -> None:
    found = [name for path in MODULES if path.name != "seeds.py" for name in streams(path)]
    assert "'episode'" in found and len(set(found)) == len(found)


VAGUE = {"util", "utils", "misc", "helper", "helpers", "manager", "managers"}


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a module gives to something."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}


def test_names_say_what_a_thing_is() -> None:
    def vague(path: Path, tree: ast.Module) -> set[str]:
        names = {*defined_names(tree), *path.relative_to(REPOSITORY).with_suffix("").parts}
        return {name for name in names if words_of(name) & VAGUE}

    assert not offenders(vague)


@cache
def tracked_texts() -> list[tuple[str, str]]:
    """Return name and text of every file under version control, or that soon may be; binaries left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            texts.append((name, (REPOSITORY / name).read_text()))
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
    return texts


UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|HA" + r"CK|X" + r"XX|NotImplemented" + r"Error)\b")

# The first letter of a pattern is looked for much faster than what stands before it.
HOSTS_AND_PLACES = {
    "a path of one machine": re.compile(
        r"/(?<![\w.~$}:/*-]/)(?:home|root|Users|work|workspace|mnt|media|scratch|private|var/tmp)/[\w.-]+"
    ),
    "a temporary path": re.compile(r"/(?<![\w.]/)tmp/[\w.-]+"),
    "a package index": re.compile(r"--(?:extra-)?index-url|--trusted-host|--find-links|PIP_INDEX_URL"),
    "a registry host": re.compile(
        r"https?://[^\s/\"')]*\b(?:artifactory|nexus|registry|mirror|proxy|pypi|devpi|internal|intranet|corp)\b"
        r"[^\s]*",
        re.IGNORECASE,
    ),
    "a network address": re.compile(
        r"(?<![=\w.-])(?!127\.0\.0\.1|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}\b(?!\.)"
    ),
    "a credential": re.compile(r"\b(?:ghp|gho|hf|sk|xoxb|glpat)[_-][A-Za-z0-9_-]{16,}|AKIA[0-9A-Z]{16}"),
    "a link with a password": re.compile(r"https?://[^\s/@]+:[^\s/@]+@"),
}


def test_nothing_is_left_for_later() -> None:
    found = [
        f"{name}: {match.group()}" for name, text in tracked_texts() for match in UNFINISHED.finditer(text)
    ]
    assert not found


@pytest.mark.parametrize("what", HOSTS_AND_PLACES)
def test_no_file_knows_the_machine_it_was_written_on(what: str) -> None:
    found = [
        f"{name}: {match.group()}"
        for name, text in tracked_texts()
        if name != name_of(Path(__file__))
        for match in HOSTS_AND_PLACES[what].finditer(text)
    ]
    assert not found


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a path of one machine", "see /home/ada/runs"),
        ("a path of one machine", "'/Users/x'"),
        ("a temporary path", "cd /tmp/abc"),
        ("a package index", "pip install --index-url x"),
        ("a registry host", "https://artifactory.example.com/api"),
        ("a registry host", "http://pypi.example.org/simple"),
        ("a network address", "10.1.2.3"),
        ("a credential", "hf_" + "a" * 20),
        ("a link with a password", "https://ada:secret@example.org"),
    ],
)
def test_the_patterns_find_what_they_are_for(what: str, text: str) -> None:
    assert HOSTS_AND_PLACES[what].search(text)


# -- what is written down -------------------------------------------------------------------------------


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Yield public modules, classes and functions without a docstring; methods need none."""
    if ast.get_docstring(tree) is None:
        yield "<module>"
    bodies = [tree.body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.If | ast.Try):
                bodies.append(node.body)
            is_documentable = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_documentable and not node.name.startswith("_") and ast.get_docstring(node) is None:
                yield node.name


def test_every_public_module_class_and_function_has_a_docstring() -> None:
    assert not offenders(lambda path, tree: list(undocumented(tree)))


def docstrings(tree: ast.Module) -> str:
    """Return all docstrings of a module."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


def registered_classes(group: str) -> Iterator[tuple[str, Path, ast.Module, ast.ClassDef]]:
    """Yield the classes decorated with `@register(group, name)`."""
    for path in MODULES:
        tree = parse(path)
        for node in tree.body:
            for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("register"):
                    arguments = [a.value for a in decorator.args if isinstance(a, ast.Constant)]
                    if len(arguments) == 2 and arguments[0] == group:
                        assert isinstance(node, ast.ClassDef)
                        yield str(arguments[1]), path, tree, node


SOURCE = re.compile(r"^\s*Sources?:", re.MULTILINE)
PAPER = re.compile(r"\b\d{4}\.\d{4,5}\b")


def test_an_algorithm_or_process_says_where_its_equations_are_from() -> None:
    """A line 'Source:' with the paper and its equations, in the class or at the top of its file."""
    parts = [
        (f"{group}={name}", f"{ast.get_docstring(tree) or ''}\n{ast.get_docstring(node) or ''}")
        for group in ("algo", "process")
        for name, _, tree, node in registered_classes(group)
    ]
    assert {"algo=bc", "algo=ppo", "algo=dppo", "process=diffusion", "process=flow"} <= dict(parts).keys()
    assert not [part for part, text in parts if not SOURCE.search(text)]


def test_a_file_of_equations_names_its_papers() -> None:
    files = {*python_files("policies/processes"), REPOSITORY / "policies/samplers/ddpm.py"}
    files |= {REPOSITORY / "algos/onpolicy/losses.py"}
    named = {name_of(path): PAPER.search(docstrings(parse(path))) for path in files}
    assert not [name for name, paper in named.items() if paper is None and not name.endswith("__init__.py")]


# -- size -----------------------------------------------------------------------------------------------

FILE_LINES, FUNCTION_LINES = 350, 60
LONGEST_FILE, LONGEST_FUNCTION = 715, 85


def test_nothing_outgrows_the_longest_of_today(record_property: Callable[[str, object], None]) -> None:
    """Report what outgrows a screen, and refuse what is longer than anything was when this was written.

    Size is a symptom. The bounds are a little above the longest file and function, so that growth is noticed:
    split what exceeds them, or raise them on purpose, and lower them where the longest became shorter.
    """
    too_long = []
    for path in MODULES:
        sizes = [(name_of(path), len(path.read_text().splitlines()), FILE_LINES, LONGEST_FILE)]
        for node in nodes(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                sizes.append((f"{name_of(path)}::{node.name}", length, FUNCTION_LINES, LONGEST_FUNCTION))
        for name, lines, screen, bound in sizes:
            if lines > screen:
                record_property(f"{name} lines", lines)
            if lines > bound:
                too_long.append(f"{name} has {lines} lines")
    assert not too_long
