"""An unstable simulation is told in the log, and the folder of its user stays clean."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import mujoco
import pytest
from point_env import PointEnv, PointStepper

from envs.engine.mujoco_warnings import log_warnings
from envs.engine.vector import ChunkVector


@pytest.fixture(autouse=True)
def handler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(None)
    monkeypatch.chdir(tmp_path)
    yield
    mujoco.set_mju_user_warning(before)


def step_unstable(times: int) -> None:
    body = "<body><joint type='slide'/><geom size='.1'/></body>"
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>")
    for _ in range(times):
        data = mujoco.MjData(model)
        data.qfrc_applied[:] = 1e300
        mujoco.mj_step(model, data)


def test_unstable_steps_are_logged_by_powers_of_ten_and_no_file_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step_unstable(1)
    assert [path.name for path in tmp_path.iterdir()] == ["MUJOCO_LOG.TXT"]  # MuJoCo's own way
    (tmp_path / "MUJOCO_LOG.TXT").unlink()
    ChunkVector(PointEnv().spec, PointStepper(1))
    with caplog.at_level(logging.WARNING):
        step_unstable(12)
    assert not list(tmp_path.iterdir())
    assert [text[:42] for text in caplog.messages] == [
        "MuJoCo warns (1 so far in this process): N",
        "MuJoCo warns (10 so far in this process): ",
    ]
    assert "simulation is unstable" in caplog.text


def test_the_handler_of_a_program_stays() -> None:
    seen: list[str] = []
    mujoco.set_mju_user_warning(seen.append)
    log_warnings()
    step_unstable(1)
    assert len(seen) == 1
