"""What is said and what still works where optional packages are not installed.

Packages are hidden in a process of their own: importing them fails, and their versions are unknown.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from burnish.commands import doctor
from burnish.commands import list as listing
from envs.make import env

HIDING = """
import importlib.abc, json, sys
from importlib import metadata

hidden = set(sys.argv[1].split(","))


class Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def version(name, known=metadata.version):
    if name.lower().replace("-", "_") in hidden:
        raise metadata.PackageNotFoundError(name)
    return known(name)


sys.meta_path.insert(0, Hiding())
metadata.version = version

from burnish import cli
from burnish.commands import doctor, list as listing

envs = {row[0]: row[6] for row in listing._envs()}
findings = {finding.subject: [finding.is_good, finding.detail] for finding in doctor._extras()}
codes = {}
sys.stdout, shown = open(sys.argv[2], "w"), sys.stdout
for command in sys.argv[3].split(","):
    try:
        cli.main(command.split())
    except SystemExit as ended:
        codes[command] = ended.code
shown.write(json.dumps({"envs": envs, "findings": findings, "codes": codes}))
"""

COMMANDS = ("doctor --no-render", "list algos", "list datasets", "list experiments", "list processes")
OPTIONAL = (
    "ogbench", "dm_control", "gymnasium_robotics", "metaworld", "robosuite", "pyarrow", "av",
    "onnx", "onnxscript", "onnxruntime", "tensorboard",
)  # fmt: skip
EXTRA_OF = {
    "adroit": "adroit", "pointmaze": "mazes", "kitchen": "kitchen",
    "metaworld": "metaworld", "cube": "ogbench", "scene": "ogbench", "puzzle": "ogbench", "og": "ogbench",
    "dmc env.task=": "dmc", "can": "robosuite", "lift": "robosuite",
    "square": "robosuite", "transport": "robosuite",
}  # fmt: skip
"""First word of a task -> extra that it needs; tasks that are not here need none."""


@pytest.fixture(scope="module")
def told_without(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def run(*hidden: str) -> dict[str, Any]:
        shown = tmp_path_factory.mktemp("shown") / "output.txt"
        command = [sys.executable, "-c", HIDING, ",".join(hidden), str(shown), ",".join(COMMANDS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def test_every_task_without_its_packages_names_the_extra_that_brings_them(told_without: Any) -> None:
    envs = told_without(*OPTIONAL)["envs"]
    assert set(EXTRA_OF) | {"avoid", "hopper"} <= {name.partition("-")[0] for name in envs}
    for name, here in envs.items():
        extra = EXTRA_OF.get(name.partition("-")[0])
        assert here.startswith("yes" if extra is None else f"no: pip install 'burnish[{extra}]'"), (
            name,
            here,
        )


def test_an_extra_of_two_steps_is_told_with_both(told_without: Any) -> None:
    here = told_without(*OPTIONAL)["envs"]["metaworld"]
    assert here == "no: pip install 'burnish[metaworld]' && pip install --no-deps metaworld==3.1.1"


def test_the_doctor_names_every_extra_that_is_not_complete(told_without: Any) -> None:
    findings = told_without(*OPTIONAL)["findings"]
    for extra in (
        "export",
        "tensorboard",
        "ogbench",
        "kitchen",
        "mazes",
        "adroit",
        "robosuite",
        "lerobot",
        "video",
    ):
        is_good, detail = findings[f"extra {extra}"]
        assert not is_good and detail.endswith(f": pip install 'burnish[{extra}]'"), (extra, detail)
        assert re.search(r"missing [\w-]+", detail), detail


def test_nothing_else_breaks_without_optional_packages(told_without: Any) -> None:
    assert set(told_without(*OPTIONAL)["codes"].values()) == {0}


def test_half_an_extra_is_as_good_as_none_and_the_others_do_not_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ogbench", reason="needs the extra 'ogbench'")
    pytest.importorskip("gymnasium_robotics", reason="needs the extra 'kitchen'")
    known = metadata.version

    def version(name: str) -> str:
        if name.lower().replace("-", "_") == "dm_control":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)
    specs = {name: env(name).spec for name in ("cube-single", "avoid", "kitchen-mixed")}
    found = [listing.availability(spec.packages, spec.extra) for spec in specs.values()]
    assert found == ["no: pip install 'burnish[ogbench]'", "yes", "yes"]
    is_good = {finding.subject: finding.is_good for finding in doctor._extras()}
    assert not is_good["extra ogbench"] and is_good["extra kitchen"]
