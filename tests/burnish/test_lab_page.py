"""The laboratory in a browser: what is drawn with the mouse changes what the policy does."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chromium import Browser, browser
from drawing import require_drawing
from small_policies import policy_for

from algos.training.run_directory import RunDirectory
from benchmarks.studies.lab import between, choose, click, drag, opened, scene
from burnish.commands.lab import LabConfig, subject_of
from burnish.lab.controls import Subject
from burnish.lab.run_control import RunControl
from burnish.lab.runs import RunFolder
from burnish.lab.server import MOST_VISITORS, Lab, LabServer
from burnish.runs.locate import Located
from envs.tasks.avoid.task import Avoid
from envs.tasks.gym.task import Gym
from envs.tasks.plane import Plane

OLD = "tests/fixtures/version_0_1/policies"
LINE = [(0.03, 0.03), (0.06, 0.12), (0.06, 0.2), (0.12, 0.3)]


@pytest.fixture(scope="module")
def plane() -> Plane:
    return scene()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    made = RunDirectory.create_at(folder, {"algo": {"name": "bc"}, "env": {"name": "avoid"}}, [])
    with made.claim():
        return made  # and nobody writes to it


@pytest.fixture(scope="module")
def address(run: RunDirectory) -> Iterator[str]:
    subject = subject_of(LabConfig(compose=[f"{OLD}/cloned", f"{OLD}/base"]))
    server = LabServer(Lab(subject, RunFolder(run.path.parent)))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server.address
    server.stop()
    thread.join(30)


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as found:
        yield found


def text_of(tab: Browser, name: str) -> str:
    return str(tab.run(f"return document.querySelector('#{name}').textContent"))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_drawn_line_is_followed(tab: Browser, address: str, plane: Plane, width: int, dark: bool) -> None:
    """Over the compared starts, too: steered paths are nearer to the line than those of the policy alone."""
    opened(tab, address, width=width, dark=dark)
    assert tab.run("return document.documentElement.scrollWidth") <= width
    assert "steer" not in text_of(tab, "command")
    choose(tab, "strategy", "guided_diffusion")
    drag(tab, plane, between(LINE, 15))
    tab.wait(
        "return document.querySelector('#command').textContent.includes('steer.scale') ||"
        "document.querySelector('#command').textContent.includes('guided_diffusion')"
    )
    tab.wait("return document.querySelector('#delay').textContent.includes('ms')")
    click(tab, "compare")
    tab.wait("return !document.querySelector('#compared').hidden")
    cell = "parseFloat(document.querySelector('#compared').rows[i].cells[2].textContent)"
    off = tab.run(f"return [1, 2].map((i) => {cell})")
    assert off[0] < 0.5 * off[1]
    choose(tab, "plans", "5")
    assert not tab.run("return document.querySelector('#compared').hidden"), "it is of any number of plans"
    choose(tab, "strength", "0")
    assert tab.run("return document.querySelector('#compared').hidden"), "it was of another strength"
    assert not tab.complaints()


def test_every_control_writes_what_reproduces_it(tab: Browser, address: str) -> None:
    opened(tab, address)
    for name, value, written in (
        ("plans", "5", "sample_noise(5,"),
        ("noise", "0.5", "noise = 0.5 *"),
        ("sampler", "euler", "Euler("),
        ("steps", "7", "steps=7"),
        ("weight", "0.2", "[0.2, 0.8]"),
    ):
        choose(tab, name, value)
        tab.wait(f"return document.querySelector('#python').textContent.includes('{written}')")
    choose(tab, "noise", "1")
    tab.wait("return document.querySelector('#command').textContent.includes('sampler=euler steps=7')")
    assert "weights=[0.2,0.8]" in text_of(tab, "command")
    assert not tab.complaints()


def test_it_plays_and_shows_the_steps_of_denoising(tab: Browser, address: str) -> None:
    opened(tab, address)
    click(tab, "play")
    tab.wait("return document.querySelector('#rate').textContent.includes('frames/s')")
    click(tab, "film")
    tab.wait("return Number(document.querySelector('#frame').max) > 5")
    assert text_of(tab, "play") == "play", "the episode waits while the steps are shown"
    before = tab.run("return document.querySelector('#scene').toDataURL()")
    choose(tab, "frame", "0")
    tab.wait(f"return document.querySelector('#scene').toDataURL() !== '{before}'")
    click(tab, "roll")
    tab.wait("return document.querySelector('#frame').value > 2")
    click(tab, "film")
    assert not tab.complaints()


def test_every_control_shows_its_value(tab: Browser, address: str) -> None:
    opened(tab, address)
    shown = (
        "return document.querySelector('#{0}').value + ' ' + document.querySelector('#{0}-value').textContent"
    )
    assert tab.run(shown.format("plans")) == "16 16" and tab.run(shown.format("noise")) == "1 × 1"
    click(tab, "film")
    tab.wait("return document.querySelector('#frame').max > 5")
    assert tab.run(shown.format("frame")) == "{0} {0} / {0}".format(
        tab.run("return document.querySelector('#frame').max")
    )
    choose(tab, "steps", "4")
    tab.wait("return document.querySelector('#frame').max == 4")
    assert tab.run(shown.format("frame")) == "4 4 / 4"
    click(tab, "film")


def test_the_right_button_leaves_the_line(tab: Browser, address: str, plane: Plane) -> None:
    opened(tab, address)
    drag(tab, plane, between(LINE, 15))
    tab.wait("return document.querySelector('#command').textContent.includes('positions')")
    x, y = tab.run(
        "const b = document.querySelector('#scene').getBoundingClientRect(); return [b.x + 9, b.y + 9]"
    )
    for kind in ("press", "release"):
        tab.mouse(kind, x, y, "right")
    choose(tab, "plans", "5")
    tab.wait("return document.querySelector('#python').textContent.includes('sample_noise(5,')")
    assert "positions" in text_of(tab, "command")


def test_the_robot_is_dragged(tab: Browser, address: str, plane: Plane) -> None:
    opened(tab, address)
    drag(tab, plane, [(0.0, 0.0), (0.02, 0.05), (0.0, 0.1)])
    tab.wait(
        "const shown = document.querySelector('#python').textContent;"
        "const state = shown.match(/tensor\\(\\[\\[\\[([^,]*), ([^,]*)/);"
        "return Math.abs(state[1]) < 0.003 && Math.abs(state[2] - 0.1) < 0.003"
    )
    assert not tab.complaints()


def test_what_is_refused_is_said(tab: Browser, address: str) -> None:
    opened(tab, address)
    tab.run("document.querySelector('#steps').max = 400")
    choose(tab, "steps", "400")
    tab.wait("return !document.querySelector('#problem').hidden")
    assert "steps" in text_of(tab, "problem")
    choose(tab, "steps", "5")
    tab.wait("return document.querySelector('#problem').hidden")


def test_what_is_refused_stays_while_it_plays(tab: Browser, address: str) -> None:
    opened(tab, address)
    choose(tab, "noise", "0.5")
    click(tab, "play")
    tab.wait("return document.querySelector('#rate').textContent.includes('frames/s')")
    click(tab, "compare")
    tab.wait("return document.querySelector('#problem').textContent.includes('noise')")
    seen = text_of(tab, "python")
    tab.wait(f"return document.querySelector('#python').textContent !== {json.dumps(seen)}")
    assert not tab.run("return document.querySelector('#problem').hidden")
    choose(tab, "noise", "1")
    tab.wait("return document.querySelector('#problem').hidden", 10)


def test_a_run_that_trains_shows_new_points_without_a_reload(
    tab: Browser, address: str, run: RunDirectory
) -> None:
    points = "return document.querySelectorAll('#run circle').length"
    with run.claim():
        for step in (1, 2):
            run.log({"policy/loss": 1 / step}, step)
        opened(tab, address)
        tab.run("window.marked = true")
        tab.wait(f"{points} === 2")
        for step in (3, 4, 5):
            run.log({"policy/loss": 1 / step}, step)
        tab.wait(f"{points} === 5")
    assert tab.run("return window.marked") and "trained" in text_of(tab, "run-list")
    assert not tab.complaints()


@contextmanager
def served(lab: Lab) -> Iterator[str]:
    """Serve a laboratory; yields its address."""
    server = LabServer(lab)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop()
        thread.join(30)


def test_runs_are_shown_without_a_policy(tab: Browser, run: RunDirectory) -> None:
    with served(Lab(None, RunFolder(run.path.parent))) as address:
        tab.open(address, width=400)
        tab.wait("return document.querySelectorAll('#run svg').length > 0")
        assert tab.run("return document.documentElement.scrollWidth") <= 400
        assert tab.run("return document.querySelector('#run-control').hidden"), "nothing is changed unasked"
        assert not tab.complaints()
        tab.open("about:blank")  # it asks no more


def test_another_run_is_shown_when_the_chosen_one_goes(tab: Browser, tmp_path: Path) -> None:
    for name in ("one", "two"):
        made = RunDirectory.create_at(tmp_path / name, {"algo": {"name": "bc"}, "env": {"name": "avoid"}}, [])
        with made.claim():
            for step in (1, 2):
                made.log({"policy/loss": 1 / step}, step)
    clock = iter(range(0, 10**6, 10))  # so that every question searches for runs
    with served(Lab(None, RunFolder(tmp_path, clock=lambda: float(next(clock))))) as address:
        tab.open(address)
        name = tab.wait("return document.querySelector('#run h3')?.textContent")
        shutil.rmtree(tmp_path / name)
        tab.wait(f"return !['', '{name}'].includes(document.querySelector('#run h3').textContent)", 15)
        assert tab.run("return document.querySelector('#runs-lost').hidden")
        shutil.rmtree(tmp_path / ("two" if name == "one" else "one"))
        tab.wait(
            "return !document.querySelector('#no-runs').hidden && !document.querySelector('#run h3')", 15
        )
        assert tab.run("return document.querySelector('#runs-lost').hidden")
        tab.open("about:blank")  # it asks no more
        tab.complaints()  # of a run that went between two questions


def test_a_run_is_continued_from_the_page(
    tab: Browser, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # complains of its options and ends
    runs = RunFolder(run.path.parent)
    with served(Lab(None, runs, RunControl(runs))) as address:
        tab.open(address)
        tab.wait("return !document.querySelector('#run-control').hidden")
        assert tab.run("return document.querySelector('#stop').disabled")
        click(tab, "continue")
        tab.wait("return document.querySelector('#run-state').textContent.includes('cat')")
        assert not tab.complaints()
        tab.open("about:blank")  # it asks no more


def test_a_task_of_mujoco_is_seen_through_a_camera(tab: Browser) -> None:
    require_drawing()
    task = Gym(id="Reacher-v5")
    with served(Lab(Subject((Located(Path("policy")),), (policy_for(task),), task))) as address:
        opened(tab, address, width=400)
        first = tab.wait("return document.querySelector('#picture').src.slice(0, 5000)")
        click(tab, "play")
        tab.wait(f"return document.querySelector('#picture').src.slice(0, 5000) !== '{first}'")
        click(tab, "film")
        tab.wait("return Number(document.querySelector('#frame').max) > 5")
        choose(tab, "frame", "0")  # noise, far beyond the limits of actions
        heading = "getContext('2d').getImageData(200, 65, 100, 14).data.every((one) => one === 0)"
        tab.wait(f"return document.querySelector('#scene').{heading}", 10)
        assert tab.run("return document.querySelector('#sketching').hidden")
        assert tab.run("return document.documentElement.scrollWidth") <= 400
        assert not tab.complaints()


def test_a_row_of_pillars_is_dragged(tab: Browser) -> None:
    task = Avoid(rows="moved")
    stepper = task.stepper(1)
    stepper.reset(0, 0)
    scene = stepper.plane(0)
    x, y, _ = scene.pillars[4]
    with served(Lab(Subject((Located(Path("policy")),), (policy_for(task),), task))) as address:
        opened(tab, address)
        before = tab.run("return document.querySelector('#scene').toDataURL()")
        drag(tab, scene, [(x, y), (x - 0.01, y), (x - 0.02, y)])
        tab.wait(f"return document.querySelector('#scene').toDataURL() !== '{before}'")
        assert not text_of(tab, "problem") and not tab.complaints()


def test_nothing_can_be_asked_of_a_laboratory_that_has_ended(tab: Browser) -> None:
    with served(Lab(subject_of(LabConfig(policy=f"{OLD}/cloned")))) as address:
        opened(tab, address)
    tab.wait("return !document.querySelector('#problem').hidden")
    buttons = "['play', 'step', 'restart', 'compare']"
    assert tab.run(f"return {buttons}.every((id) => document.querySelector(`#${{id}}`).disabled)")
    tab.complaints()  # of the connection


def test_a_page_too_many_says_so(tab: Browser) -> None:
    lab = Lab(subject_of(LabConfig(policy=f"{OLD}/cloned")))
    lab._visitors = MOST_VISITORS
    with served(lab) as address:
        tab.open(address)
        tab.wait("return !document.querySelector('#problem').hidden")
        tab.run("return new Promise((done) => setTimeout(done, 300))")
        assert "pages are open already" in text_of(tab, "problem")
