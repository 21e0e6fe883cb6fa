"""The page of docs/draw: its session in JavaScript computes what Python does, and it works from a file."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chromium import Browser, browser
from messages import mentions
from small_policies import policy_for
from test_site import HOOKS

from benchmarks import draw
from benchmarks.studies.lab import LINE, between, click, drag, scene
from burnish.runs.locate import locate
from envs.spec import Array
from envs.tasks.avoid.task import Avoid
from envs.tasks.plane import Plane
from policies.errors import CapabilityError
from policies.runner import ENCODER, STEP, open_session, run
from policies.samplers.ddpm import DDIM
from policies.storage.policy_folder import save_policy
from policies.wrappers.sketch_guidance import SketchedPolicy
from policies.wrappers.sketch_settings import STRATEGIES, SketchSettings

ROOT = Path(__file__).resolve().parents[2]
STRENGTHS: dict[str, dict[str, Any]] = {
    "random": {},
    "output_perturbation": {"guide_rows": 3},
    "post_hoc_ranking": {"candidates": 5},
    "biased_initialization": {"start": 0.3},
    "guided_diffusion": {"scale": 12},
    "stochastic_sampling": {"scale": 30},
}


@pytest.fixture(scope="module")
def policy() -> Any:
    return locate(ROOT / draw.POLICY).load().eval()


@pytest.fixture(scope="module")
def plane() -> Plane:
    return scene()


@pytest.fixture(scope="module")
def states() -> Array:
    """Observations (B, 4): at rest, and on the way."""
    return np.array([[0.0, 0.0, 0.0, 0.0], [0.05, 0.1, 0.1, 0.3], [-0.02, 0.3, -0.2, 0.2]], np.float32)


@pytest.fixture(scope="module")
def packages() -> Path:
    if not HOOKS.has_packages():
        pytest.skip("the npm packages of the page are missing: make site")
    return Path(HOOKS.PACKAGES)


def test_what_the_page_knows_is_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    told, kept = json.loads(json.dumps(draw.facts(locate(draw.POLICY)))), json.loads(draw.FACTS.read_text())
    for name, values in told.pop("levels").items():
        assert values == pytest.approx(kept["levels"][name], rel=1e-9)
    kept.pop("levels")
    assert told == kept and set(kept["strategies"]) == set(STRENGTHS) == set(STRATEGIES)


def test_the_graphs_are_those_of_the_policy(policy: Any, states: Array) -> None:
    encoder, network = (open_session(ROOT / draw.GRAPHS / name) for name in (ENCODER, STEP))
    (cond,) = run(encoder, {"observation": states[:, None]})
    x, time = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(0)), policy.table.net_time[7:8]
    (found,) = run(network, {"x": x.numpy(), "time": time.numpy(), "cond": cond})
    with torch.inference_mode():
        expected = policy.bind(policy.encode({"state": torch.from_numpy(states)[:, None]}))(7, x)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_page_computes_what_python_does(policy: Any, plane: Plane, states: Array, packages: Path) -> None:
    """Plans of every strategy from the same noise, and the path of the disc under the same actions."""
    if shutil.which("node") is None:
        pytest.skip("node is missing")
    asked, expected = [], []
    obs, generator = {"state": torch.from_numpy(states)[:, None]}, torch.Generator().manual_seed(0)
    for strategy, settings in {"off": {}, **STRENGTHS}.items():
        view = policy
        if strategy != "off":
            view = SketchedPolicy(policy, plane.sketch(LINE), SketchSettings(strategy, **settings))
        noise = view.sample_noise(len(states), generator=generator)
        with torch.inference_mode():
            expected.append(view.plan(obs, noise).flatten(1).numpy())
        asked.append({
            "strategy": strategy, "strength": next(iter(settings.values()), None), "line": LINE,
            "observations": states.tolist(), "noise": noise.flatten().tolist(),
        })  # fmt: skip
    through, into = Avoid().demonstrate(3).actions.tolist(), [[0.0, 1.0]] * 60
    actions = [{"seed": seed, "rows": rows} for seed, rows in ((3, through), (2**32 - 1, into))]
    answer = subprocess.run(
        ["node", Path(__file__).with_name("draw_session.cjs"), packages],
        input=json.dumps({"plans": asked, "actions": actions}), capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(answer.stdout)
    for one, plans, wanted in zip(asked, found["plans"], expected, strict=True):
        np.testing.assert_allclose(plans, wanted, atol=2e-5, err_msg=one["strategy"])
    for one, shown in zip(actions, found["paths"], strict=True):
        path = driven(one["seed"], one["rows"])
        np.testing.assert_allclose(shown["path"], path, atol=1e-9, err_msg="path")
    assert [one["end"] for one in found["paths"]] == ["success", "failure"]


def driven(seed: int, rows: list[list[float]]) -> Array:
    """Return the observations (L + 1, 4) under actions, until the episode ends."""
    stepper = Avoid().stepper(1)
    path = [stepper.reset(0, seed)]
    for row in rows:
        step = stepper.step(np.array([0]), np.array([row]))
        path.append(step.obs[0])
        if step.terminated[0]:
            break
    return np.array(path)


def test_a_drawn_line_is_followed_without_a_server(page: Path, plane: Plane, tab: Browser) -> None:
    tab.open(page, width=400, dark=True)
    tab.wait("return document.querySelector('#command').textContent.length > 0")
    assert tab.run("return document.documentElement.scrollWidth") <= 400
    assert tab.run("return document.querySelector('#python-box').hidden")
    drag(tab, plane, between(LINE, 15))
    tab.wait("return document.querySelector('#command').textContent.includes('guided_diffusion')")
    click(tab, "compare")
    tab.wait("return !document.querySelector('#compared').hidden")
    cell = "parseFloat(document.querySelector('#compared').rows[i].cells[2].textContent)"
    off = tab.run(f"return [1, 2].map((i) => {cell})")
    assert off[0] < 0.5 * off[1]
    click(tab, "play")
    tab.wait("return document.querySelector('#rate').textContent.includes('frames/s')")
    assert tab.run("return document.querySelector('#problem').hidden") and not tab.complaints()


@pytest.fixture(scope="module")
def page(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    shutil.copy(ROOT / draw.FOLDER / "session.js", folder)
    scripts = {name: HOOKS.packed(files) for name, files in HOOKS.PACKED.items()}
    for name, text in (HOOKS.drawing_page() | scripts).items():
        (folder / name).write_text(text)
    return folder / "index.html"


@pytest.fixture(scope="module")
def tab() -> Any:
    with browser() as found:
        yield found


FAILING = """
require(process.argv[1]);
const facts = { hz: 100 }, heard = [];
const step = async () => { throw new Error("no memory"); };
const session = { made: { facts }, reset: async () => ({}), step };
const socket = new globalThis.draw.OwnSocket(Promise.resolve(session));
socket.addEventListener("message", (event) => heard.push(JSON.parse(event.data).error));
socket.send('{"play": true}');
setTimeout(() => { process.stdout.write(JSON.stringify(heard)); process.exit(); }, 300);
"""


def test_a_step_that_fails_is_told_now_and_then() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is missing")
    command = [node, "-e", FAILING, str(ROOT / "docs/draw/session.js")]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert told == [None, "no memory"]  # the facts, and one error


def test_a_policy_that_the_page_cannot_run_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POLICY", "GRAPHS", "FACTS"):
        monkeypatch.setattr(draw, name, tmp_path / name)
    saved = save_policy(policy_for(Avoid()).with_sampler(DDIM(steps=5)), tmp_path / "saved")
    with pytest.raises(CapabilityError, match=mentions("docs/draw/session.js stochastic sampler")):
        draw.write(locate(saved))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
