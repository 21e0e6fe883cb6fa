"""Hooks of MkDocs (`make site`): pages outside of docs/, the reference of docstrings, and links of both."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "overview.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "reporting.md": "SECURITY.md",
}
"""Pages of the site whose text is outside of docs/."""

REFERENCE = {
    "interface": ("Python interface", ["burnish/api.py"]),
    "policies": ("Policies", ["policies/*.py", "policies/storage/policy_folder.py"]),
    "processes": ("Processes", ["policies/processes/*.py"]),
    "samplers": ("Samplers", ["policies/samplers/*.py"]),
    "networks": ("Networks", ["policies/backbones/*.py", "policies/encoders/*.py", "policies/networks/*.py"]),
    "wrappers": (
        "Execution and composition",
        ["policies/execution/*.py", "policies/composition/*.py", "policies/wrappers/*.py"],
    ),
    "algorithms": ("Algorithms", ["algos/*.py", "algos/critics/*.py"]),
    "training": ("Training", ["algos/training/*.py", "algos/onpolicy/*.py", "algos/offpolicy/*.py"]),
    "environments": ("Environments", ["envs/*.py", "envs/rollouts/*.py"]),
    "evaluation": ("Evaluation", ["envs/evaluation/*.py"]),
    "datasets": ("Datasets", ["envs/datasets/*.py", "envs/datasets/formats/*.py"]),
}
"""Pages of the reference: title, and the modules on it."""

FENCE = re.compile(r"(^```.*?^```[^\n]*\n)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that docs/ does not hold."""
    from mkdocs.structure.files import File

    for uri, source in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    for name, (title, patterns) in REFERENCE.items():
        text = "\n\n".join([f"# {title}", *(f"::: {module}" for module in modules(patterns))])
        files.append(File.generated(config, f"reference/{name}.md", content=text + "\n"))
    return files


def modules(patterns: list[str]) -> Iterator[str]:
    """Yield the dotted names of modules, without those of packages."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.name not in ("__init__.py", "__main__.py"):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt links and fences of a page."""
    return adapted(markdown, page.file.src_uri)


def adapted(markdown: str, uri: str) -> str:
    """Rewrite links for the site, and the languages of fences that only tests tell apart.

    Args:
        markdown: Text with links that hold in the repository.
        uri: Page of the site.
    """
    parts = FENCE.split(markdown)
    parts[1::2] = [re.sub(r"^```(\w+) run$", r"```\1", text, flags=re.MULTILINE) for text in parts[1::2]]
    parts[::2] = [LINK.sub(lambda found: _link(*found.groups(), uri), text) for text in parts[::2]]
    return "".join(parts)


def _link(image: str, text: str, target: str, uri: str) -> str:
    """Return a link as the site has it; its text alone where the site does not have the file."""
    if re.match(r"[a-z]+:|#", target):
        return f"{image}[{text}]({target})"
    path, _, anchor = target.partition("#")
    source = OUTSIDE.get(uri, f"docs/{uri}")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    inside = {source: name for name, source in OUTSIDE.items()} | {source: uri}
    if place in inside:
        name = inside[place]
    elif place.startswith("docs/"):
        name = place.removeprefix("docs/")
    else:
        return text
    relative = posixpath.relpath(name, posixpath.dirname(uri) or ".")
    return f"{image}[{text}]({relative}{'#' if anchor else ''}{anchor})"
