"""`burnish new`: a new part as one file, its test and its section of a page, all complete as they are."""

from __future__ import annotations

import argparse
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

import assets
from burnish.console import output
from policies import registry
from policies.errors import ConfigError

KINDS = ("task", "algo", "process", "sampler", "reader")


def main(arguments: Sequence[str]) -> int:
    """Write the files and print how they are used."""
    parser = argparse.ArgumentParser(prog="burnish new", description="Begin a part of your own.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name", help="its name on the command line, and that of the file")
    parser.add_argument("folder", nargs="?", default=".", help="where the files are written")
    given = parser.parse_args(arguments)
    for path in write(given.kind, given.name, Path(given.folder)):
        output().print(f"written: {path}", markup=False, soft_wrap=True)
    test = Path(given.folder) / f"test_{given.name}.py"
    output().print(f"test it: python -m pytest {test}", markup=False, soft_wrap=True)
    return 0


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write `<name>.py`, `test_<name>.py` and `<name>.md`; returns the files.

    Raises:
        ConfigError: If the name is none for a Python module, is taken, or a file exists.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise ConfigError(f"name must be that of a Python module, such as my_{kind}; got '{name}'.")
    if kind in ("algo", "process", "sampler") and registry.is_known(kind, name):
        raise ConfigError(f"{kind}={name} exists; choose another name.")
    title = "".join(word.capitalize() for word in name.split("_"))
    targets = {f"{name}.py": f"{kind}.py", f"test_{name}.py": f"{kind}_test.py", f"{name}.md": f"{kind}.md"}
    if taken := [folder / target for target in targets if (folder / target).exists()]:
        raise ConfigError(f"{taken[0]} exists; choose another name or folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for target, template in targets.items():
        text = Template(assets.path(f"new/{template}.txt").read_text(encoding="utf-8"))
        values = {"name": name, "Class": title, "title": title}
        (folder / target).write_text(text.substitute(values), encoding="utf-8")
    return [folder / target for target in targets]
