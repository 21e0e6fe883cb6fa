"""The documentation is true: links, commands, keys and references exist, and short examples run."""

from __future__ import annotations

import ast
import re
import shlex
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from burnish.app import with_main_key
from burnish.cli import split_command
from burnish.commands.list import KINDS
from burnish.config.commands import COMMANDS
from burnish.config.nodes import GROUPS
from burnish.config.schema import compose_command, refuse_unused
from envs.datasets.episodes import EpisodeDataset
from policies import registry
from policies.backbones import Backbone
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.processes.shortcut import Shortcut
from policies.protocols import Cond
from policies.samplers.loop import denoise
from policies.samplers.ode import Euler
from policies.storage.policy_folder import load_policy, save_policy
from tests.small_policies import observations, statistics

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
)
OWN = [page for page in PAGES if "results" not in page.relative_to(ROOT).parts]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
REFERENCE = re.compile(r"^((?:[\w.]+/)*[\w.]+\.py)(?::([A-Za-z_][\w.]*))?$")
LINK = re.compile(r"\]\(([^)\s]+)\)")
KEY = re.compile(r"^([a-z_]+)\.([a-z_][\w.]*)(?:=.*)?$")
EXAMPLES = ROOT / "docs" / "extending.md"
TUNED = ("algo=dppo", "env=avoid")
"""Parts of the run that the pages call `runs/tuned`, which a resumed run brings along."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    language: str
    text: str


def _blocks(page: Path, *languages: str) -> list[Block]:
    found = [Block(page, *match.groups()) for match in FENCE.finditer(page.read_text())]
    return [block for block in found if block.language in languages]


def _commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every shell command of a page, with placeholders `<name>` filled in."""
    for block in _blocks(page, "bash", "sh"):
        text = re.sub(r"<(\w+)>", r"\1", block.text.replace("\\\n", " "))
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words:
                yield words


def _prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def _codes() -> Iterator[tuple[Path, str]]:
    """Yield every page with every `code` of its prose."""
    for page in OWN:
        for text in CODE.findall(_prose(page)):
            yield page, text


def _names(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=[str(page.relative_to(ROOT)) for page in pages])


# -- links and references -------------------------------------------------------------------------------


def _anchor(heading: str) -> str:
    """Return the anchor that a Markdown page gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_to_files_and_headings() -> None:
    links = [(page, target) for page in PAGES for target in LINK.findall(_prose(page))]
    for page, target in links:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page}: {target} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", _prose(file), re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{page}: {target}: no such heading"


@cache
def _definitions(path: Path) -> frozenset[str]:
    """Return the names that a module defines: `name`, `Class`, `Class.method`, `Class.field`."""
    return frozenset(_defined(ast.parse(path.read_text()).body, ""))


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def test_errors_that_pages_explain_are_raised() -> None:
    """What begins a row under *When it fails* and is no name occurs in the sources."""
    sources = "".join(
        path.read_text() for name in (*registry.PACKAGES, "burnish") for path in (ROOT / name).rglob("*.py")
    )
    said = re.sub(r'"\s*\n\s*f?"', "", sources)
    rows = [row for page in OWN for row in page.read_text().partition("## When it fails")[2].splitlines()]
    quoted = [text for row in rows if row.startswith("| `") for text in CODE.findall(row.split("|")[1])]
    messages = [re.sub(r"^algo=\w+ ", "", text) for text in quoted if " " in text]
    assert len(messages) > 10
    for message in messages:
        assert all(part.strip() in said for part in message.split("…")), message


def test_every_test_file_stands_beside_its_law() -> None:
    """tests/README.md names files without `test_` and `.py`."""
    lines = (ROOT / "tests" / "README.md").read_text().splitlines()
    cells = [line.split("|")[2] for line in lines if line.startswith("| ")]
    named = {name.rpartition("/")[2] for cell in cells for name in CODE.findall(cell)}
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    assert not {file for file in files if not any(fnmatch(file, name) for name in named)}, (
        "not in tests/README.md"
    )
    assert not {name for name in named if not any(fnmatch(file, name) for file in files)}, "no such test file"


def test_references_to_code_exist() -> None:
    for page, text in _codes():
        match = REFERENCE.match(text)
        if match is None or "<" in text:
            continue
        path, name = ROOT / match.group(1), match.group(2)
        assert path.is_file(), f"{page}: `{text}`: no such file"
        assert name is None or name in _definitions(path), f"{page}: `{text}`: no such name"


# -- commands and keys ----------------------------------------------------------------------------------


_PARSER = OverridesParser.create()


@cache
def _single(override: str) -> str:
    """Return an override without its sweep: the first of its values."""
    parsed = _PARSER.parse_override(override)
    if not parsed.is_sweep_override():
        return override
    return f"{parsed.get_key_element()}={next(iter(parsed.sweep_string_iterator()))}"


@cache
def _compose(command: str, overrides: tuple[str, ...]) -> Any:
    """Return a configuration; no key of it may be without effect."""
    composed = compose_command(command, [_single(override) for override in overrides])
    if command == "train":
        refuse_unused(*composed)
    return composed.config


@_names(OWN)
def test_commands_compose(page: Path) -> None:
    for words in _commands(page):
        if words[0] != "burnish":
            continue
        assert len(words) > 1, "a command is missing"
        name, arguments = split_command(words[1:])
        assert name in COMMANDS, f"unknown command: {' '.join(words)}"
        if name == "list":
            assert arguments[0] in {*KINDS, "datasets", "experiments"}
        elif COMMANDS[name].schema is not None:
            arguments = with_main_key(name, arguments)
            flags = ("--cfg", "--multirun", "--info", "--help", "job")
            known = TUNED if "resume=runs/tuned" in arguments else ()
            _compose(name, (*known, *(word for word in arguments if word not in flags)))


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for page in OWN for words in _commands(page) if words[0] == "make"}
    named |= {text.split()[1] for _, text in _codes() if text.startswith("make ")}
    assert named and named <= targets


def test_experiments_exist() -> None:
    folder = ROOT / "configs" / "experiment"
    for page in OWN:
        for name in re.findall(r"experiment=([a-z0-9_]+)(?![\w<*])", page.read_text()):
            assert (folder / f"{name}.yaml").is_file(), f"{page}: {name}"


@cache
def _sections() -> dict[str, list[type]]:
    """Return what stands below a key: the parts of a group, or a section of a command."""
    found = {group: list(registry.parts(group).values()) for group in GROUPS}
    for command in COMMANDS.values():
        config = None if command.schema is None else command.config_class()()
        for name, value in ({} if config is None else vars(config)).items():
            if is_dataclass(value):
                found.setdefault(name, []).append(type(value))
    return found


@cache
def _keys() -> frozenset[str]:
    """Return every key below a group or a section: `algo.lr`, `env.expert.noise`, `search.keep`, …"""
    found = {key for name, kinds in _sections().items() for kind in kinds for key in _flat(kind, name)}
    return frozenset(found | {f"policy.normalizer.{feature}" for feature in ("state", "goal", "action")})


def _flat(kind: type, prefix: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield f"{prefix}.{field.name}"
        if is_dataclass(hints[field.name]):
            yield from _flat(hints[field.name], f"{prefix}.{field.name}")


ATTRIBUTES = {
    "policy.noise_shape",
    "policy.sample_noise",
    "policy.with_sampler",
    "policy.onnx",
    "encoder.onnx",
}
"""What reads like a key and is an attribute or a file."""


def test_configuration_keys_exist() -> None:
    for page, text in _codes():
        match = KEY.match(text)
        if match is None or match.group(1) not in _sections():
            continue
        key = f"{match.group(1)}.{match.group(2)}"
        assert key in _keys() | ATTRIBUTES, f"{page}: `{text}`: no such key"


EXPLAINED_ON = {
    "bc": ["bc"],
    "ppo": ["ppo"],
    "dppo": ["dppo", "ppo"],
    "reinflow": ["reinflow", "ppo"],
    "fpo": ["fpo", "ppo"],
    "awm": ["fpo", "ppo"],
    "policyflow": ["policyflow", "ppo"],
    "td3_bc": ["offline"],
    "rebrac": ["offline"],
    "iql": ["offline"],
    "prdc": ["prdc", "offline"],
    "a2pr": ["a2pr", "offline"],
    "cdsa": ["cdsa"],
    "dsrl": ["dsrl", "offpolicy"],
    "sac": ["sac", "offpolicy"],
    "rlpd": ["sac", "offpolicy"],
    "qc": ["critics"],
    "fql": ["critics"],
    "idql": ["critics"],
    "expo": ["critics"],
    "residual": ["critics"],
    "recap": ["recap", "bc"],
    "world": ["world"],
    "diffuser": ["planners", "bc"],
    "decision_diffuser": ["planners", "bc"],
    "trajectories": ["planners"],
    "dqc": ["critics"],
    "pa_rl": ["critics"],
    "qam": ["qam", "critics"],
    "qam_edit": ["qam", "critics"],
    "qam_fql": ["qam", "critics"],
    "trqam": ["qam", "critics"],
    "famo2o": ["critics"],
    "gorl": ["ppo"],
    "srpo": ["critics"],
    "cfpi": ["critics"],
}
"""Where the settings of an algorithm are explained."""


def test_every_algorithm_has_pages_that_explain_its_settings() -> None:
    assert set(EXPLAINED_ON) == set(_parts("algo"))


@pytest.mark.parametrize(("algo", "pages"), list(EXPLAINED_ON.items()))
def test_every_setting_is_on_the_page_of_its_algorithm(algo: str, pages: list[str]) -> None:
    text = "".join((ROOT / "docs" / "algorithms" / f"{page}.md").read_text() for page in pages)
    missing = [f.name for f in fields(registry.lookup("algo", algo)) if f"`algo.{f.name}`" not in text]
    assert not missing


@pytest.mark.parametrize("kind", ["env", "sampler", "process", "algo"])
def test_every_part_is_documented(kind: str) -> None:
    text = "".join(page.read_text() for page in OWN)
    missing = [name for name in _parts(kind) if not re.search(rf"[`=/]{re.escape(name)}\b", text)]
    assert not missing


def _parts(kind: str) -> list[str]:
    """Return what is registered, but for what tests register."""
    parts = registry.parts(kind).items()
    return [name for name, part in parts if part.__module__.split(".")[0] != "tests"]


# -- examples -------------------------------------------------------------------------------------------


@_names([page for page in OWN if _blocks(page, "python", "python run")])
def test_python_compiles(page: Path) -> None:
    """Pages without Python are left out."""
    broken = []
    for block in _blocks(page, "python", "python run"):
        try:
            compile(block.text, str(page.relative_to(ROOT)), "exec")
        except SyntaxError as error:
            broken.append(f"{error}: {error.text}")
    assert not broken


RUNNABLE = [page for page in OWN if page != EXAMPLES and _blocks(page, "python run")]


@_names(RUNNABLE)
def test_short_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    broken = []
    for block in _blocks(page, "python run"):
        try:
            exec(compile(block.text, str(page.relative_to(ROOT)), "exec"), {"__name__": "example"})
        except Exception:
            broken.append(f"{block.text}\n{traceback.format_exc()}")
    assert not broken, "\n".join(broken)


@pytest.fixture
def extensions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The complete examples, registered for the time of one test."""
    monkeypatch.setattr(registry, "_PARTS", {group: dict(parts) for group, parts in registry._PARTS.items()})
    names: dict[str, Any] = {"__name__": "example"}
    for block in _blocks(EXAMPLES, "python run"):
        exec(compile(block.text, EXAMPLES.name, "exec", dont_inherit=True), names)
    for group, name in (("sampler", "shifted_euler"), ("algo", "filtered_bc"), ("backbone", "plain")):
        OmegaConf.structured(registry.lookup(group, name))
    return names


def test_the_example_sampler_is_euler_without_shift_and_exact_on_straight_paths(
    extensions: dict[str, Any],
) -> None:
    sampler, flow = extensions["ShiftedEuler"], RectifiedFlow()
    torch.testing.assert_close(
        sampler(steps=5).table(flow).coefficients, Euler(steps=5).table(flow).coefficients
    )
    generator = torch.Generator().manual_seed(0)
    noise, goal = (torch.rand(2, 4, 3, generator=generator, dtype=torch.float64) - 0.5 for _ in range(2))
    for shift in (0.5, 1.0, 3.0):
        table = sampler(steps=4, shift=shift).table(flow)
        assert table.times[0] == 0.0 and table.times[-1] == 1.0
        torch.testing.assert_close(denoise(lambda k, x: goal - noise, table, noise).action, goal)
    with pytest.raises(ConfigError, match="needs process=flow"):
        sampler().table(VPDiffusion())


def test_the_example_algorithm_clones_the_best_episodes_only(extensions: dict[str, Any]) -> None:
    from algos.base import Setup

    frames, start = 12, torch.arange(0, 13, 3)
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[start[1:] - 1] = True
    rewards = torch.tensor([0.0, 3.0, 1.0, 2.0]).repeat_interleave(3)
    observations = torch.arange(frames).float().unsqueeze(1)
    data = EpisodeDataset(observations, -observations, rewards, torch.zeros_like(ends), ends, start)
    config = extensions["FilteredBcConfig"](keep=0.5, steps=2, batch_size=4, warmup_steps=0)
    run = config.build(Setup(dataset=data))
    assert run._source.num == 6
    low = run.policy.normalizer.decode("state", torch.tensor([-1.0]))
    assert float(low) == pytest.approx(3.0), "the statistics are those of episodes 1 and 3"
    assert run.advance()["policy/loss"].isfinite()
    with pytest.raises(ConfigError, match="algo=filtered_bc needs demonstrations"):
        config.build(Setup())


def test_the_example_backbone_is_one_network_in_training_and_acting(
    extensions: dict[str, Any], tmp_path: Path
) -> None:
    backbone = extensions["PlainConfig"](width=8)
    config = PolicyConfig(process=RectifiedFlow(), backbone=backbone, horizon=3, act_steps=2)
    policy = build_policy(config, obs_dim=5, action_dim=2, statistics=statistics())
    assert isinstance(policy, DenoisingPolicy) and isinstance(policy.field, Backbone)
    generator = torch.Generator().manual_seed(0)
    seen = observations(2)
    te = policy.sample_te(2, generator=generator)
    policy.matching_loss(
        policy.encode({"state": seen}), torch.rand(2, 3, 2, generator=generator), te
    ).sum().backward()
    assert all(weight.grad is not None for weight in policy.field.parameters())
    x, vec = torch.randn(6, 3, 2, generator=generator), torch.randn(2, 5, generator=generator)
    times, cond_row, time_row = torch.tensor([0.1, 0.5, 0.9]), torch.arange(6) // 3, torch.arange(6) % 3
    shared = policy.field(x, times, Cond(vec), cond_row, time_row)
    torch.testing.assert_close(policy.field(x, times[time_row], Cond(vec[cond_row])), shared)
    bound = policy.field.bind(Cond(vec[:1]), times)
    torch.testing.assert_close(bound(1, x[1:2]), shared[1:2])
    save_policy(policy, tmp_path / "policy")
    noise = policy.sample_noise(2, generator=generator)
    assert load_policy(tmp_path / "policy").act(seen, noise=noise).equal(policy.act(seen, noise=noise))
    jumps = replace(config, process=Shortcut(max_steps=8))  # its network is told the length of a step too
    assert build_policy(jumps, obs_dim=5, action_dim=2, statistics=statistics()).act(seen).isfinite().all()
