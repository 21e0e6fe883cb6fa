"""Hooks of MkDocs (`make site`): pages outside of docs/, the reference of docstrings, and links of both.

The page on which a policy runs in the browser is made of the templates of `burnish lab`, docs/draw, and two
npm packages beside the environment of the site. Packages and graphs become scripts that hold them as text: a
page that is opened from a file can load nothing else.
"""

from __future__ import annotations

import ast
import base64
import gzip
import json
import logging
import posixpath
import re
from collections.abc import Iterator, Mapping
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

DRAW = ("docs/draw", "draw/index.html")
"""The page with a policy: its folder in the repository, and its place on the site."""
PACKAGES = ROOT / ".venv-site" / "node_modules"
ORT, MUJOCO = PACKAGES / "onnxruntime-web" / "dist", PACKAGES / "@mujoco" / "mujoco"
GRAPHS = ROOT / "docs" / "draw" / "graphs"
PACKED = {
    "onnxruntime.js": {
        "ort.mjs": ORT / "ort.wasm.bundle.min.mjs",
        "ort.wasm": ORT / "ort-wasm-simd-threaded.wasm",
    },
    "mujoco.js": {"mujoco.mjs": MUJOCO / "mujoco.js", "mujoco.wasm": MUJOCO / "mujoco.wasm"},
    "policy.js": {
        **{name: GRAPHS / name for name in ("encoder.onnx", "step.onnx", "loop.json", "facts.json")},
        "avoid.xml": ROOT / "assets" / "avoid.xml",
    },
}
"""Scripts of that page, and the files that they hold by the names that docs/draw/session.js asks for."""

FENCE = re.compile(r"(^```.*?^```[^\n]*\n)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that docs/ does not hold."""
    from mkdocs.structure.files import File

    for uri, source in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    for name, (title, patterns) in REFERENCE.items():
        parts = offered() if name == "interface" else [f"::: {module}" for module in modules(patterns)]
        text = "\n\n".join([f"# {title}", *parts])
        files.append(File.generated(config, f"reference/{name}.md", content=text + "\n"))
    if has_packages():
        scripts = {name: packed(files) for name, files in PACKED.items()}
        for name, text in (drawing_page() | scripts).items():
            files.append(File.generated(config, f"draw/{name}", content=text))
    else:
        logging.getLogger("mkdocs.hooks").info("npm is missing: the site has no page to draw on (draw.md)")
    return files


def has_packages() -> bool:
    """Return whether npm has put its packages beside the environment of the site."""
    return all(path.is_file() for files in PACKED.values() for path in files.values())


def drawing_page() -> dict[str, str]:
    """Return the files of the laboratory's page, for docs/draw/session.js."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    places = [ROOT / "burnish" / part / "templates" for part in ("lab", "reports")]
    templates = Environment(
        loader=FileSystemLoader(places), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    scripts = ["session.js", "lab.js"]
    return {
        "index.html": templates.get_template("lab.html").render(query="", scripts=scripts),
        "lab.css": templates.get_template("lab.css").render(),
        "lab.js": (places[0] / "lab.js").read_text(),
    }


def packed(files: Mapping[str, Path]) -> str:
    """Return a script that holds files, compressed, by name."""
    texts = {
        name: base64.b64encode(gzip.compress(path.read_bytes(), 6, mtime=0)).decode()
        for name, path in files.items()
    }
    return f"globalThis.packed = {{ ...globalThis.packed, ...{json.dumps(texts)} }};\n"


def offered() -> list[str]:
    """Return the parts of the page of what `import burnish` offers, and nothing else of its modules."""
    tree = ast.parse((ROOT / "burnish" / "__init__.py").read_text())
    plain = [one for one in tree.body if isinstance(one, ast.Assign)]
    values = {ast.unparse(one.targets[0]): ast.literal_eval(one.value) for one in plain}
    outside = values["_OUTSIDE_API"]
    own = ["Run", *(name for name in values["__all__"] if name not in outside and name != "__version__")]
    others = [
        f"::: {place}.{name}\n    options: {{heading: burnish.{name}}}" for name, place in outside.items()
    ]
    return [f"::: burnish.api\n    options: {{members: {json.dumps(own)}}}", *others]


def modules(patterns: list[str]) -> Iterator[str]:
    """Yield the dotted names of modules, without those of packages."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.name not in ("__init__.py", "__main__.py"):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt links and fences of a page."""
    text = adapted(markdown, page.file.src_uri)
    if page.file.src_uri == "draw.md" and not has_packages():
        text += "\nThis site was made without npm, and so without the page.\n"
    return text


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
    inside = {source: name for name, source in OUTSIDE.items()} | {source: uri, DRAW[0]: DRAW[1]}
    if place == DRAW[0] and not has_packages():
        return text
    if place in inside:
        name = inside[place]
    elif place.startswith("docs/"):
        name = place.removeprefix("docs/")
    else:
        return text
    relative = posixpath.relpath(name, posixpath.dirname(uri) or ".")
    return f"{image}[{text}]({relative}{'#' if anchor else ''}{anchor})"
