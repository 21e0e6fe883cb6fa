"""How large the source tree is, and whether its modules import each other in circles.

    python -m benchmarks.layout

prints files, lines, classes and functions per package, how many entries its top has, and every import circle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.sparse.csgraph import connected_components

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("burnish", "algos", "envs", "policies")
"""What is shipped with code in it; `configs` and `assets` hold data."""


def python_files(*folders: str) -> list[Path]:
    """Return the modules below some folders of the repository, sorted."""
    return sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file; each file is parsed once."""
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    """Return the dotted name of a module; a package is its `__init__.py`."""
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(tree: ast.Module, modules: Iterable[str]) -> Iterator[str]:
    """Yield which of some modules a module imports, also late and for annotations only.

    `from package import module` imports the module; `from package import name` the package's own file.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            wanted = [name if name in modules else str(node.module) for name in inner]
        else:
            continue
        yield from (name for name in wanted if name in modules)


def import_circles(sources: Mapping[str, ast.Module]) -> list[list[str]]:
    """Return the sets of modules that reach each other by imports, as sorted names.

    Args:
        sources: Syntax trees by module name.
    """
    place = {name: i for i, name in enumerate(sources)}
    reaches = np.zeros((len(place), len(place)), bool)
    for name, tree in sources.items():
        for other in imported_modules(tree, place):
            reaches[place[name], place[other]] = other != name
    count, label = connected_components(reaches, directed=True, connection="strong")
    sets = [[name for name, i in place.items() if label[i] == group] for group in range(count)]
    return sorted(sorted(names) for names in sets if len(names) > 1)


def entries(package: str) -> list[str]:
    """Return the modules and rooms (sub-packages) at the top of a package, without its `__init__.py`."""
    inside = (REPOSITORY / package).iterdir()
    rooms = {path.name for path in inside if path.is_dir() and any(path.glob("*.py"))}
    files = {path.name for path in (REPOSITORY / package).glob("*.py")}
    return sorted(rooms | files - {"__init__.py", "__main__.py"})


def _sizes(*folders: str) -> list[int]:
    """Return the numbers of files, lines, classes and functions below some folders."""
    files = python_files(*folders)
    nodes = [node for path in files for node in ast.walk(parse(path))]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return [
        len(files),
        sum(len(path.read_text().splitlines()) for path in files),
        sum(isinstance(node, ast.ClassDef) for node in nodes),
        sum(isinstance(node, functions) for node in nodes),
    ]


def main() -> None:
    """Print the tables."""
    console = Console()
    table = Table("package", "files", "lines", "classes", "functions", "entries at the top")
    for package in PACKAGES:
        table.add_row(package, *map(str, _sizes(package)), str(len(entries(package))))
    table.add_section()
    table.add_row("shipped", *map(str, _sizes(*PACKAGES)))
    for folder in ("benchmarks", "examples", "tests"):
        table.add_row(folder, *map(str, _sizes(folder)), style="dim")
    console.print(table)
    circles = import_circles(
        {module_name(path): parse(path) for path in python_files(*PACKAGES, "benchmarks")}
    )
    console.print(f"import circles: {len(circles)}")
    for names in circles:
        console.print("  " + ", ".join(names))


if __name__ == "__main__":
    main()
