"""Names of parts: each belongs to one class, however often its file is imported."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from entry import exit_code
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


def test_the_variable_names_modules_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(registry.PLUGIN_VARIABLE, "mine_here")
    registry._plugins.cache_clear()
    try:
        assert "mine_here" in [module.__name__ for module in registry.plugins()]
    finally:
        registry._plugins.cache_clear()


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "broken_here.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(registry.PLUGIN_VARIABLE, "broken_here")
    registry._plugins.cache_clear()
    yield "plug-in 'broken_here' BURNISH_PLUGINS cannot be imported no_such_module"
    registry._plugins.cache_clear()


@pytest.mark.parametrize(
    "words",
    [
        ("list", "samplers"),
        ("list", "experiments"),
        ("train", "algo=filtered_bc"),
        ("runs", "."),
        ("export", "--cfg", "job"),
        ("train", "--help"),
    ],
)
def test_a_plugin_that_cannot_be_imported_stops_every_command(
    words: tuple[str, ...], broken_plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*words) == 2
    assert re.search(mentions(broken_plugin), capsys.readouterr().err)


def test_a_plugin_that_cannot_be_imported_hides_no_names(broken_plugin: str) -> None:
    for ask in (lambda: registry.names("sampler"), lambda: registry.is_known("sampler", "mine")):
        with pytest.raises(ConfigError, match=mentions(broken_plugin)):
            ask()
    assert registry.lookup("sampler", "euler") is Euler


def test_an_unknown_part_may_be_that_of_a_plugin() -> None:
    with pytest.raises(ConfigError, match=mentions("unknown sampler 'mine' euler plug-in BURNISH_PLUGINS")):
        registry.from_json("sampler", {"name": "mine"})
