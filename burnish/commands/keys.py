"""Reference page of all keys: `python -m burnish.commands.keys` writes docs/keys.md from the dataclasses.

A key is documented once, beside its default: in the comment after the field, or in the section `Args` or
`Attributes` of the docstring.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import json
import re
import textwrap
import tokenize
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import omegaconf

from burnish.app import run_app
from burnish.commands.list import summary
from burnish.config.commands import COMMANDS
from burnish.config.help import KEPT
from burnish.config.nodes import GROUPS
from burnish.config.overrides import default_options, preset_summary, presets
from burnish.config.train import PolicyShape
from burnish.console import output
from envs.datasets import reader_options
from envs.evaluation.settings import EvaluationSettings
from policies import registry
from policies.bounds import bounds_of
from policies.policy_config import PolicyConfig
from policies.wrappers.sketch_settings import SketchSettings

PAGE = "docs/keys.md"
FOLDED = (EvaluationSettings, SketchSettings)
"""Keys that are explained once, in the table of `burnish eval`."""
KINDS = {bool: "bool", int: "int", float: "float", str: "text", Path: "file", Any: "any"}
ROW = "| {} | {} | {} | {} | {} |"
HEAD = [ROW.format("key", "type", "range", "default", "what it decides"), "|---|---|---|---|---|"]
GROUP_ROW = f"{ROW} {{}} |"
GROUP_HEAD = [f"{HEAD[0]} of |", f"{HEAD[1]}---|"]

INTRODUCTION = """# Keys

Every key of every command and of every part, once, with its type, range and default. This page is written by
`python -m burnish.commands.keys` from the dataclasses, the only home of defaults and explanations; a test
compares the two. What the keys of an algorithm mean together is on its page ([BC](algorithms/bc.md),
[DPPO](algorithms/dppo.md), [PPO](algorithms/ppo.md)); how keys are written is in [cli.md](cli.md). An
experiment changes defaults: `--cfg job` prints what a command would take. What `experiment=auto` chooses from
the data is in the log and in the run's `config.yaml`.
"""

READERS = """\
How a dataset is read, for every command that takes `dataset=`. The format follows from the content of
the file; an option of another format is refused."""

EXTRA = {
    "train": "Beside these: `experiment=<name>` (`burnish list experiments`), and `hydra.run.dir=<folder>`, "
    "where the run is written.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, and the help pages of the commands."""
    parser = argparse.ArgumentParser("python -m burnish.commands.keys", description="Write the page of keys.")
    parser.add_argument("path", nargs="?", default=PAGE)
    path = Path(parser.parse_args(arguments).path)
    path.write_text(page(), encoding="utf-8")
    kept = {name: help_of(name) for name, command in COMMANDS.items() if command.schema}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    output().print(f"written: {path}, {KEPT.name}", markup=False, soft_wrap=True)
    return 0


def help_of(command: str) -> str:
    """Return what `burnish <command> --help` says, composed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run_app(command, ["--help"])
    return text.getvalue()


@dataclass(frozen=True)
class Key:
    """A key of a command or part, as a table row."""

    name: str
    type: str
    range: str
    default: str
    text: str

    def cells(self) -> tuple[str, ...]:
        return f"`{self.name}`", self.type, self.range, f"`{self.default}`", _escaped(self.text)


def page() -> str:
    """Return the page in Markdown."""
    lines = [INTRODUCTION, "## Commands", ""]
    for command in COMMANDS.values():
        if command.schema is not None:
            rows = rows_of(command.config_class()(), "", default_options(command.name))
            extra = [EXTRA[command.name], ""] if command.name in EXTRA else []
            lines += [f"### burnish {command.name}", "", *extra, *HEAD, *rows, ""]
    for group in GROUPS:
        lines += [f"## {group}", "", *_group(group), ""]
    lines += _reader_options()
    return "\n".join(lines).rstrip() + "\n"


def _group(group: str) -> Iterator[str]:
    parts = {name: registry.lookup(group, name) for name in sorted(registry.sources(group))}
    found: dict[str, dict[str, Key]] = {}
    for name, part in parts.items():
        yield f"- `{group}={name}`: {_escaped(summary(part))}"
        for key in keys_of(part(), f"{group}."):
            found.setdefault(key.name, {})[name] = key
    for name in presets(group):
        yield f"- `{group}={name}`: {_escaped(preset_summary(group, name))}"
    yield from ("", *GROUP_HEAD) if found else ()
    places = list(dict.fromkeys(name.rpartition(".")[0] for name in found))
    for name in sorted(found, key=lambda name: places.index(name.rpartition(".")[0])):
        yield _group_row(found[name], list(parts))


def _group_row(having: Mapping[str, Key], parts: Sequence[str]) -> str:
    cells = zip(*(key.cells() for key in having.values()), strict=True)
    shown = [_joint(dict(zip(having, values, strict=True))) for values in cells]
    return GROUP_ROW.format(*shown, _owners(list(having), parts))


def _joint(values: Mapping[str, str]) -> str:
    """Format the values of several parts in one cell: the most frequent one, then the exceptions."""
    first, *others = [value for value, _ in Counter(values.values()).most_common()]
    return "; ".join([first, *(f"{', '.join(k for k in values if values[k] == v)}: {v}" for v in others)])


def _owners(having: Sequence[str], parts: Sequence[str]) -> str:
    lacking = [name for name in parts if name not in having]
    if len(lacking) < len(having):
        return f"all but {', '.join(lacking)}" if lacking else "all"
    return ", ".join(having)


def _reader_options() -> list[str]:
    found: dict[str, dict[str, Key]] = {}
    every = reader_options()
    for form, options in every.items():
        for one in options.values():
            text = _in_yaml(one.text).replace("see the module", "see [Data](data.md)")
            key = Key(f"reader.{one.name}", _type(one.hint), "", _shown(one.default), text)
            found.setdefault(key.name, {})[form] = key
    lines = ["## reader", "", READERS, "", *GROUP_HEAD]
    return lines + [_group_row(having, list(every)) for having in found.values()]


def rows_of(config: Any, prefix: str = "", chosen: Mapping[str, str | None] | None = None) -> Iterator[str]:
    """Yield a row of the table for every key of a configuration; see `keys_of`."""
    for key in keys_of(config, prefix, chosen):
        yield ROW.format(*key.cells())


def keys_of(config: Any, prefix: str = "", chosen: Mapping[str, str | None] | None = None) -> Iterator[Key]:
    """Yield every key of a configuration, including nested keys.

    Args:
        config: The dataclass with its defaults.
        prefix: Prefix of its keys, e.g. `algo.`.
        chosen: Default options of groups.
    """
    kind = type(config)
    hints, words = typing.get_type_hints(kind), explanations(kind)
    for f in fields(kind):
        value, name = getattr(config, f.name), f"{prefix}{f.name}"
        if type(value) in FOLDED and not isinstance(config, EvaluationSettings):
            yield _folded(name, value, words.get(f.name, ""))
            continue
        if is_dataclass(value):
            yield from keys_of(value, f"{name}.")
            continue
        type_name, text, bounds = _type(hints[f.name]), words.get(f.name, ""), bounds_of(f)
        if hints[f.name] is Any and f.name in GROUPS:
            type_name, value = f"[{f.name}](#{f.name})", (chosen or {}).get(f.name)
        yield Key(name, type_name, "" if bounds is None else _escaped(str(bounds)), _shown(value), text)


def _folded(name: str, value: Any, text: str) -> Key:
    """Return the row that represents keys which are explained in the table of `burnish eval`."""
    usual, names = type(value)(), [f.name for f in fields(value)]
    own = [one for one in names if getattr(value, one) != getattr(usual, one)]
    default = ", ".join(f"{one}: {_shown(getattr(value, one))}" for one in own or names[:1])
    text = f"{text}: `{name}.{names[0]}` and so on, see [burnish eval](#burnish-eval)"
    return Key(f"{name}.*", "keys", "", default, text)


def _shown(value: Any) -> str:
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
    """Return the documentation of a dataclass's fields by name; base classes come first."""
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
    sections = re.split(r"^(\w+):\n", inspect.cleandoc(docstring), flags=re.MULTILINE)
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        if title in ("Args", "Attributes"):
            entries = textwrap.dedent(re.split(r"\n(?=\S)", body)[0])  # up to the next paragraph
            for entry in re.split(r"\n(?=\w+:)", entries):
                name, _, text = entry.partition(":")
                yield name.strip(), " ".join(text.split("\n\n")[0].split())


@cache
def _commented(kind: type) -> list[tuple[str, str]]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:  # a `variant` without fields of its own
        return []
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found = []
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found.append((node.target.id, " ".join(comments[line] for line in lines if line in comments)))
    return found


def _in_yaml(text: str) -> str:
    for python, ours in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{python}\b", ours, text)
    return text


def _escaped(text: str) -> str:
    pieces = re.split(r"(`[^`]*`)", text.replace("|", "\\|").rstrip("."))
    return "".join(piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces)


if __name__ == "__main__":
    raise SystemExit(main())
