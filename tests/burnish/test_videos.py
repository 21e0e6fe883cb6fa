"""Moving pictures of evaluated episodes, failures first."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import require_drawing
from messages import mentions
from PIL import Image

import burnish
from burnish.commands.new import write
from burnish.reports import videos
from burnish.reports.videos import try_drawing, webp, worst_first, write_videos
from envs.rollouts.episodes import EpisodeRow
from envs.tasks.mjcf import Mjcf
from policies.errors import CapabilityError


def row(seed: int, return_: float, success: bool) -> EpisodeRow:
    return EpisodeRow(seed, seed, return_, 3, success, True, False, actions=np.zeros((3, 2)))


def test_failures_and_low_returns_come_first() -> None:
    rows = [row(0, 5.0, True), row(1, 2.0, False), row(2, 1.0, True), row(3, 1.0, False)]
    assert [one.seed for one in worst_first(rows)] == [3, 1, 2, 0]


def test_a_webp_holds_every_frame_in_real_time(tmp_path: Path) -> None:
    frames = np.stack([np.full((4, 6, 3), value, np.uint8) for value in (0, 120, 240)])
    (tmp_path / "a.webp").write_bytes(webp(frames, 10.0))
    with Image.open(tmp_path / "a.webp") as image:
        assert (image.n_frames, image.size) == (3, (6, 4))
        image.seek(2)
        image.load()
        assert image.info["duration"] == 100
        assert abs(int(np.asarray(image.convert("RGB")).mean()) - 240) < 12


class Drawn:
    """A task that draws an episode as a grey ramp."""

    class spec:
        control_hz, success_rule, name = 40.0, "always", "drawn"

    def render_frames(self, seed: int, actions: np.ndarray, *, every: int) -> np.ndarray:
        assert every == 2
        return np.stack([np.full((32, 48, 3), 40 * step, np.uint8) for step in range(len(actions))])


def test_files_are_named_by_seed_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos.importlib.util, "find_spec", lambda name: None)
    rows = [row(0, 5.0, True), row(1, 2.0, False)]
    written = write_videos(Drawn(), rows, 2, tmp_path / "new", "eval-7")
    assert [path.name for path in written] == ["eval-7-seed1-failure.webp", "eval-7-seed0-success.webp"]
    assert all(path.stat().st_size for path in written)
    with pytest.raises(CapabilityError, match=mentions("render_frames(seed,")):
        try_drawing(type("Blind", (), {"spec": Drawn.spec})())


@pytest.mark.skipif(importlib.util.find_spec("imageio_ffmpeg") is None, reason="imageio-ffmpeg is missing")
def test_with_imageio_ffmpeg_it_is_an_mp4(tmp_path: Path) -> None:
    (path,) = write_videos(Drawn(), [row(0, 5.0, True)], 1, tmp_path, "eval")
    assert path.suffix == ".mp4" and b"ftyp" in path.read_bytes()[:12]


@pytest.mark.usefixtures("small_pictures")
def test_evaluation_writes_them_and_changes_no_number(tmp_path: Path) -> None:
    require_drawing()
    task = Mjcf(file=str(write("task", "disc", tmp_path)[0]), max_episode_steps=6)
    tiny: dict[str, Any] = {
        "algo.steps": 2,
        "algo.warmup_steps": 0,
        "algo.batch_size": 8,
        "backbone.width": 8,
    }
    run = burnish.clone(
        (np.zeros((9, 4)), np.zeros((9, 2))),
        env=task,
        directory=tmp_path / "run",
        num_workers=0,
        progress=False,
        evaluation={"episodes": 0},
        **tiny,
    )
    plain = burnish.evaluate(run, episodes=3, num_workers=0, out=tmp_path / "plain.json")
    shown = burnish.evaluate(run, episodes=3, num_workers=0, out=tmp_path / "shown.json", videos=2)
    assert plain.videos == () and len(shown.videos) == 2
    assert all(path.parent == tmp_path and path.stat().st_size for path in shown.videos)
    one, other = (json.loads(result.path.read_text()) for result in (plain, shown))
    assert one == other
    page = burnish.report(run, num_workers=0, out=tmp_path / "page").read_text()
    assert "image/webp" in page and (tmp_path / "page" / "behaviour.webp").is_file()
