"""Names of parts: each belongs to one class, however often its file is imported."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from messages import mentions

from burnish.commands import doctor
from policies import registry
from policies.errors import ConfigError
from policies.samplers.ode import Euler


@pytest.fixture
def group() -> Iterator[str]:
    yield "test_group"
    registry._PARTS.pop("test_group", None)


def part(module: str, file: str | None) -> type:
    """Return a class `Part` of a module that lies in a file."""
    there = types.ModuleType(module)
    if file is not None:
        there.__file__ = file
    sys.modules[module] = there

    class Part:
        pass

    Part.__module__, Part.__qualname__ = module, "Part"
    return dataclass(Part)


def test_a_class_of_the_same_name_elsewhere_does_not_take_the_place(group: str) -> None:
    first = registry.register(group, "one")(part("ours", "/a/ours.py"))
    with pytest.raises(ConfigError, match=mentions("test_group=one ours.Part")):
        registry.register(group, "one")(part("theirs", "/b/theirs.py"))
    assert registry.lookup(group, "one") is first


def test_a_file_that_runs_as_the_main_program_may_be_imported_too(group: str) -> None:
    registry.register(group, "one")(part("as_main", "/a/plugin.py"))
    again = registry.register(group, "one")(part("imported", "/a/plugin.py"))
    assert registry.lookup(group, "one") is again


def test_a_cell_of_a_notebook_may_be_run_again(group: str) -> None:
    registry.register(group, "one")(part("notebook", None))
    again = registry.register(group, "one")(part("notebook", None))
    assert registry.lookup(group, "one") is again


def announce(path: Path, name: str, source: str) -> None:
    """Lay out a distribution with one plug-in, as pip would."""
    (path / f"{name}_parts.py").write_text(source)
    facts = path / f"{name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[burnish.plugins]\nparts = {name}_parts\n")


def test_a_plugin_that_cannot_be_imported_is_named_and_the_others_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(tmp_path, "aa_broken", "import no_such_module")
    announce(tmp_path, "zz_whole", "loaded = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    named = r"plug-in 'parts' \(aa_broken_parts\) of aa_broken cannot .*No module named 'no_such_module'"
    registry._plugins.cache_clear()
    with pytest.raises(ConfigError, match=named):
        registry.load_plugins()
    assert sys.modules.pop("zz_whole_parts").loaded
    try:
        doctor.main(["--no-render"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "FAIL plug-ins" in shown and "aa_broken" in shown and "ok parts" in shown
    finally:
        registry._plugins.cache_clear()


def test_a_built_in_part_cannot_be_replaced() -> None:
    mine = part("mine", "/a/mine.py")
    mine.__qualname__ = "Euler"
    with pytest.raises(ConfigError, match=mentions("sampler=euler")):
        registry.register("sampler", "euler")(mine)
    assert registry.lookup("sampler", "euler") is Euler
