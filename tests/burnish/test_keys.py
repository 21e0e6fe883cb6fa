"""The page of keys is what the dataclasses say, and every key is explained."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pairwise
import pytest

from burnish import cli
from burnish.commands import keys
from burnish.config.commands import COMMANDS
from burnish.config.help import kept_help
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.registry import PLUGIN_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = (ROOT / keys.PAGE).read_text()


def test_the_committed_page_is_the_one_that_is_generated() -> None:
    assert keys.page() == COMMITTED, "run python -m burnish.commands.keys"


def test_kept_help_pages_are_those_that_the_commands_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    described = [name for name, command in COMMANDS.items() if command.schema]
    for name in described if pairwise.everything else ("train",):
        assert kept_help(name) == keys.help_of(name), "run python -m burnish.commands.keys"
    assert all(map(kept_help, described))
    monkeypatch.setenv(PLUGIN_VARIABLE, "a_module")
    assert kept_help("train") is None


def test_help_is_printed_as_it_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert [cli._dispatch(name, ["--help"]) for name in ("train", "eval")] == [0, 0]
    assert capsys.readouterr().out == f"{kept_help('train')}{kept_help('eval')}"


def test_every_key_is_explained() -> None:
    rows = [line for line in COMMITTED.splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert not [row for row in rows if re.search(r"\|\s*\|$", row)]


def test_every_key_is_listed_once() -> None:
    sections = COMMITTED.split("\n#")
    for section in sections:
        names = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
        assert len(names) == len(set(names))


def test_every_command_with_keys_has_a_table() -> None:
    for command in COMMANDS.values():
        assert (f"### burnish {command.name}\n" in COMMITTED) == (command.schema is not None)


@dataclass
class Inner:
    """Below the other one.

    Attributes:
        width: Widths
            of two things; None for none.
    """

    width: tuple[int, ...] = bounded((1, 2), ge=1)


@dataclass
class Base:
    """What is inherited."""

    kept: float | None = None  # None: a | b <c>
    changed: int = 1  # explained in the base


@dataclass
class Outer(Base):
    """Of every kind of field."""

    changed: int = 2
    inner: Inner = field(default_factory=lambda: Inner((3,)))
    long: dict[str, int] = field(
        # inside the brackets
        default_factory=lambda: {"a": 1}
    )

    def __post_init__(self) -> None:
        if self.changed < 0:  # no explanation of a field
            raise ConfigError("negative")


def test_explanations_come_from_comments_docstrings_and_bases() -> None:
    assert list(keys.rows_of(Outer(), "x.")) == [
        r"| `x.kept` | float or null |  | `null` | null: a \| b &lt;c> |",
        "| `x.changed` | int |  | `2` | explained in the base |",
        "| `x.inner.width` | list of int | at least 1 | `[3]` | Widths of two things; null for none |",
        "| `x.long` | text → int |  | `{a: 1}` | inside the brackets |",
    ]
