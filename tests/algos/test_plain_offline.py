"""Our steps are those of a plain program: what the speed cases compare computes the same thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algos.base import Setup
from algos.prdc import PrdcConfig
from algos.td3_bc import Td3BcConfig
from benchmarks.speed.cases_offline import arrays_of, require_equal_steps, same_weights, synthetic_dataset
from benchmarks.speed.peers_offline import PlainPrdc, PlainTd3Bc


@pytest.mark.parametrize(("config", "program"), [(Td3BcConfig, PlainTd3Bc), (PrdcConfig, PlainPrdc)])
def test_two_steps_equal_those_of_a_plain_program(config: Any, program: Any) -> None:
    run = config(steps=4).build(Setup(dataset=synthetic_dataset(2000), seed=0))
    peer = program(arrays_of(run))
    same_weights(run, peer)
    require_equal_steps(run, peer, torch.arange(len(run.table)))
    assert run.learner.steps == peer.steps == 2, "the second step moves the actor"
