"""The site: every page has its place, links lead somewhere in it, and nothing is taken from a network."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from chromium import browser

import burnish
from benchmarks import gallery
from policies import registry

ROOT = Path(__file__).resolve().parents[1]


def _hooks(name: str = "site") -> Any:
    spec = importlib.util.spec_from_file_location(f"{name}_hooks", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = _hooks()


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the objects that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def _pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [page for one in inner for page in _pages(one)]


def test_every_page_is_in_the_navigation_once() -> None:
    """Pages of single results are reached from the page of all results."""
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    written = {page for page in written if not page.startswith("results/")}
    made = {*HOOKS.OUTSIDE, *(f"reference/{name}.md" for name in HOOKS.REFERENCE)}
    assert sorted(_pages(SETTINGS["nav"])) == sorted(written | made)


def test_the_reference_is_made_of_modules_that_exist() -> None:
    for _, patterns in HOOKS.REFERENCE.values():
        for pattern in patterns:
            found = list(HOOKS.modules([pattern]))
            assert found and all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in found)


def test_the_page_of_the_interface_has_what_the_package_offers_and_no_more() -> None:
    page = "\n".join(HOOKS.offered())
    named = set(re.findall(r"heading: burnish\.(\w+)", page)) | set(re.findall(r'"(\w+)"', page))
    assert named == {*burnish.__all__, "Run"} - {"__version__"}


def test_names_in_angle_brackets_are_not_lost_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    readable = _hooks("site_docstrings").readable
    written = "Writes <run>/a, `<b>`; n < 3.\n\nFiles::\n\n    <c>/d\n\nIn <e>.\n\nExample:\n    >>> <f>\n"
    shown = "Writes &lt;run>/a, `<b>`; n < 3.\n\nFiles::\n\n    <c>/d\n\nIn &lt;e>.\n\nExamples:\n    >>> <f>"
    assert readable(written) == shown


@pytest.mark.parametrize(
    ("uri", "written", "shown"),
    [
        ("cli.md", "[a](../README.md#use)", "[a](overview.md#use)"),
        ("algorithms/dppo.md", "[a](../../CONTRIBUTING.md#oracles)", "[a](../contributing.md#oracles)"),
        ("algorithms/dppo.md", "[a](../results/avoid.md)", "[a](../results/avoid.md)"),
        ("overview.md", "![a](docs/pictures/demo.webp) [b](examples)", "![a](pictures/demo.webp) b"),
        ("contributing.md", "[a](docs/speed.md), [b](CHANGELOG.md)", "[a](speed.md), [b](changes.md)"),
        ("cli.md", "[a](#keys) [b](https://x.org/y)", "[a](#keys) [b](https://x.org/y)"),
        ("cli.md", "```python run\nx[0](../README.md)\n```\n", "```python\nx[0](../README.md)\n```\n"),
    ],
)
def test_links_are_those_of_the_site(uri: str, written: str, shown: str) -> None:
    assert HOOKS.adapted(written, uri) == shown


@pytest.mark.parametrize("has_packages", [False, True])
def test_the_page_to_draw_on_is_linked_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch, has_packages: bool
) -> None:
    monkeypatch.setattr(HOOKS, "has_packages", lambda: has_packages)
    assert HOOKS.adapted("[a](draw)", "lab.md") == ("[a](draw/index.html)" if has_packages else "a")
    assert HOOKS.adapted("[a](../draw)", "algorithms/bc.md").endswith("(../draw/index.html)") == has_packages


def test_the_page_to_draw_on_is_that_of_the_laboratory(tmp_path: Path) -> None:
    page = HOOKS.drawing_page()
    assert re.findall(r'(?:src|href)="([^"]*)"', page["index.html"]) == [
        "data:,", "lab.css", "session.js", "lab.js",
    ]  # fmt: skip
    assert "--sketch" in page["lab.css"] and "ownSocket" in page["lab.js"]
    (tmp_path / "a").write_bytes(bytes(range(256)))
    (held,) = re.findall(r'{"a": "(.*)"}', HOOKS.packed({"a": tmp_path / "a"}))
    assert gzip.decompress(base64.b64decode(held)) == bytes(range(256))


def test_nothing_is_taken_from_a_network() -> None:
    assert SETTINGS["theme"]["font"] is False and "offline" in SETTINGS["plugins"]
    taken = [*SETTINGS["extra_css"], *SETTINGS["extra"]["polyfills"]]
    assert all((ROOT / "docs" / name).is_file() for name in taken)
    assert not re.search(r"(?<!/)//\w|@import|url\(", (ROOT / "docs" / "site.css").read_text())
    assert any("iframe-worker" in name for name in taken), "without it the plugin takes one from a network"


def test_the_gallery_shows_the_tasks_that_were_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = gallery.drawn()
    assert "avoid" in names and set(names) <= set(registry.names("env"))
    assert gallery.PAGE.read_text() == gallery.page(names)
    assert all((gallery.PICTURES / f"{name}.webp").stat().st_size < 200_000 for name in names)


def test_rows_without_a_number_are_sorted_last(tmp_path: Path) -> None:
    cells = ("7 %", "–", "51 %", "1,234", "−3")
    rows = "".join(f"<tr><td>{cell}</td></tr>" for cell in cells)
    table = f"<article><table><thead><tr><th>a</th></tr></thead><tbody>{rows}</tbody></table></article>"
    page = tmp_path / "page.html"
    script = (ROOT / "docs" / "tables.js").read_text()
    page.write_text(f"<meta charset='utf-8'>{table}<script>{script}</script>")
    shown = "return [...document.querySelectorAll('td')].map((cell) => cell.textContent)"
    with browser() as tab:
        tab.open(page)
        for order in (["1,234", "51 %", "7 %", "−3", "–"], ["−3", "7 %", "51 %", "1,234", "–"]):
            tab.run("document.querySelector('th').click()")
            assert tab.run(shown) == order


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_pages_of_a_built_site_open_from_files_and_are_searched(width: int, dark: bool) -> None:
    site = ROOT / "site"
    if not (site / "index.html").is_file():
        pytest.skip("there is no site: make site")
    with browser() as tab:
        for page in ("index.html", "lab.html", "results/avoid.html", "reference/policies.html"):
            tab.open(site / page, width=width, dark=dark)
            assert tab.run("return document.documentElement.scrollWidth") <= width
            assert tab.run(
                "return [...document.images].every((one) => !one.complete || one.naturalWidth > 0)"
            )
        field = "const field = document.querySelector('.md-search__input'); field.value = 'reinflow';"
        typed = "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));"
        tab.run(f"{field} field.focus(); {typed}")
        tab.wait("return document.querySelectorAll('.md-search-result__item').length > 0")
        assert not tab.complaints()
