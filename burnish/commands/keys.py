"""The page of every key, made from the dataclasses: `python -m burnish.commands.keys` rewrites docs/keys.md.

A key is explained in one place, next to its default: in the comment behind the field, or in the section
`Args` or `Attributes` of the docstring.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import omegaconf

from burnish.commands.list import summary
from burnish.config.commands import COMMANDS
from burnish.config.overrides import default_options
from burnish.config.parts import GROUPS
from burnish.config.train import PolicyShape
from burnish.console import output
from envs.datasets import reader_options
from policies import registry
from policies.policy_config import PolicyConfig

PAGE = "docs/keys.md"
OURS = ("algos", "envs", "policies")
"""Packages whose parts are on the page; plug-ins have pages of their own."""

KINDS = {bool: "bool", int: "int", float: "float", str: "text", Path: "file", Any: "any"}
ROW = "| {} | {} | {} | {} |"
HEAD = [ROW.format("key", "type", "default", "what it decides"), "|---|---|---|---|"]

INTRODUCTION = """# Keys

Every key of every command and of every part, with its type and default. This page is written by
`python -m burnish.commands.keys` from the dataclasses, the only home of defaults and explanations; a test
compares the two. What the keys of an algorithm mean together is on its page ([BC](algorithms/bc.md),
[DPPO](algorithms/dppo.md), [PPO](algorithms/ppo.md)); how keys are written is in [cli.md](cli.md). An
experiment changes defaults: `--cfg job` prints what a command would take.
"""

READERS = (
    "How a dataset is read, for every command that takes `dataset=`; which format a file has, its content\n"
    "tells. An option that its format does not have is refused."
)

EXTRA = {
    "train": "Beside these: `experiment=<name>` (`burnish list experiments`), and `hydra.run.dir=<folder>`, "
    "where the run is written.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m burnish.commands.keys", description="Write the page of keys."
    )
    parser.add_argument("path", nargs="?", default=PAGE)
    path = Path(parser.parse_args(arguments).path)
    path.write_text(page(), encoding="utf-8")
    output().print(f"written: {path}", markup=False, soft_wrap=True)
    return 0


def page() -> str:
    """Return the page in Markdown."""
    lines = [INTRODUCTION, "## Commands", ""]
    for command in COMMANDS.values():
        if command.schema is not None:
            keys = rows_of(command.config_class()(), "", default_options(command.name))
            lines += [
                f"### burnish {command.name}",
                "",
                *_sentence(EXTRA.get(command.name)),
                *HEAD,
                *keys,
                "",
            ]
    for group in GROUPS:
        lines += [f"## {group}", ""]
        for rows, parts in _parts(group):
            title = ", ".join(f"{group}={name}" for name in parts)
            said = [f"- `{name}`: {_escaped(summary(part))}" for name, part in parts.items()]
            table = [*HEAD, *rows] if rows else ["No keys."]
            lines += [f"### {title}", "", *said, "", *table, ""]
    lines += _reader_options()
    return "\n".join(lines).rstrip() + "\n"


def _reader_options() -> list[str]:
    """Return the section of the options that formats of datasets have."""
    lines = ["## data", "", READERS, ""]
    for form, options in reader_options().items():
        rows = [
            ROW.format(
                f"`data.{one.name}`",
                _type(one.hint),
                f"`{_shown(one.default)}`",
                _escaped(_in_yaml(one.text)).replace("see the module", "see [Data](data.md)"),
            )
            for one in options.values()
        ]
        lines += [f"### Options of {form}", "", *(["No keys."] if not rows else [*HEAD, *rows]), ""]
    return lines


def _sentence(text: str | None = None) -> list[str]:
    return [text, ""] if text else []


def _parts(group: str) -> list[tuple[tuple[str, ...], dict[str, type]]]:
    """Return the rows of a group's parts, each with the parts that have them."""
    found: dict[tuple[str, ...], dict[str, type]] = {}
    for name, part in registry.parts(group).items():
        if part.__module__.split(".")[0] in OURS:
            found.setdefault(tuple(rows_of(part(), f"{group}.")), {})[name] = part
    return list(found.items())


def rows_of(config: Any, prefix: str = "", chosen: Mapping[str, str | None] | None = None) -> Iterator[str]:
    """Yield a row of the table for every key of a configuration, the keys below it included.

    Args:
        config: The dataclass with its defaults.
        prefix: What stands before its keys, e.g. `algo.`.
        chosen: Options of groups that are chosen by default.
    """
    kind = type(config)
    hints, words = typing.get_type_hints(kind), explanations(kind)
    for f in fields(kind):
        value, name = getattr(config, f.name), f"{prefix}{f.name}"
        if is_dataclass(value):
            yield from rows_of(value, f"{name}.")
            continue
        type_name, text = _type(hints[f.name]), words.get(f.name, "")
        if hints[f.name] is Any and f.name in GROUPS:
            type_name, value = f"[{f.name}](#{f.name})", (chosen or {}).get(f.name)
        yield ROW.format(f"`{name}`", type_name, f"`{_shown(value)}`", _escaped(text))


def _shown(value: Any) -> str:
    """Write a value as the command line takes it."""
    if value == omegaconf.MISSING:
        return "–"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_shown(item)}' for key, item in value.items())}}}"
    return str(value)


def _type(hint: Any) -> str:
    """Name a type."""
    options = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join("null" if option is type(None) else _type(option) for option in options)
    if typing.get_origin(hint) in (tuple, list, Sequence):
        inner = [option for option in options if option is not Ellipsis]
        length = "" if len(inner) < len(options) or len(options) < 2 else f"{len(inner)} "
        return f"list of {length}{_type(inner[0])}"
    if typing.get_origin(hint) is dict:
        return " → ".join(map(_type, options))
    return KINDS.get(hint, str(hint))


def explanations(kind: type) -> dict[str, str]:
    """Return what the source says about the fields of a dataclass, by name; bases are asked first."""
    if kind is PolicyShape:
        return explanations(PolicyConfig)
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if is_dataclass(one):
            own = one.__dict__.get("__doc__") or ""
            found |= {name: _in_yaml(text) for name, text in _documented(own) if text}
            found |= {name: _in_yaml(text) for name, text in _commented(one) if text}
    return found


def _documented(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the sections `Args` and `Attributes`."""
    sections = re.split(r"^(\w+):\n", inspect.cleandoc(docstring), flags=re.MULTILINE)
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        if title in ("Args", "Attributes"):
            for entry in re.split(r"\n(?=\w+:)", textwrap.dedent(body)):
                name, _, text = entry.partition(":")
                yield name.strip(), " ".join(text.split("\n\n")[0].split())


def _commented(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the names of the fields that a class declares itself, and the comments behind them."""
    source = textwrap.dedent(inspect.getsource(kind))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            yield node.target.id, " ".join(comments[line] for line in lines if line in comments)


def _in_yaml(text: str) -> str:
    """Write Python's words for values as the command line takes them."""
    for python, ours in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{python}\b", ours, text)
    return text


def _escaped(text: str) -> str:
    """Keep a text from ending a cell or being taken for HTML."""
    pieces = re.split(r"(`[^`]*`)", text.replace("|", "\\|").rstrip("."))
    return "".join(piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces)


if __name__ == "__main__":
    raise SystemExit(main())
