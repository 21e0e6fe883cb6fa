"""GoRL: PPO on latents, refits of the decoder, stages that resume."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from messages import mentions
from small_algorithms import init, observed, setup, small
from torch import Tensor

from algos.onpolicy.gorl import Gorl, GorlConfig
from algos.training.serialization import from_plain, to_plain
from policies.errors import CapabilityError, ConfigError
from policies.wrappers.noise_policy import SteeredPolicy


def begin(process: str = "flow", config: GorlConfig | None = None, **changes: Any) -> Gorl:
    return (config or small(GorlConfig)).build(setup(process, dataset=None, **changes))


def finished(run: Gorl) -> Gorl:
    while run.progress < run.total:
        run.advance()
    run.close()
    return run


def weights(module: Any) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in module.state_dict().values()])


def test_a_run_begins_as_its_clone_bit_by_bit() -> None:
    run, base = begin(), init("flow")
    policy = run.snapshot()
    noise = base.sample_noise(5, generator=torch.Generator().manual_seed(1))
    assert isinstance(policy, SteeredPolicy)
    assert torch.equal(policy.act(observed(), noise=noise), base.act(observed(), noise=noise))
    run.close()


def test_the_ratio_is_one_on_fresh_data_and_the_decoder_stays_within_a_stage() -> None:
    run = begin(config=replace(small(GorlConfig), stage_steps=1000, update_epochs=1, batch_size=1000))
    before, encoder = weights(run.policy.base), weights(run.policy.actor)
    first = run.advance()
    assert float(first["policy/ratio_mean"]) == pytest.approx(1, abs=1e-6)
    assert float(first["policy/ratio_spread"]) < 1e-6
    finished(run)
    assert torch.equal(weights(run.policy.base), before)
    assert not torch.equal(weights(run.policy.actor), encoder)


def test_without_refits_the_run_is_that_of_one_stage_bit_by_bit() -> None:
    one = finished(begin(config=replace(small(GorlConfig), stage_steps=1000)))
    other = finished(begin(config=replace(small(GorlConfig), refit_steps=0)))
    assert torch.equal(weights(one.policy), weights(other.policy))


def test_a_larger_weight_keeps_latents_smaller() -> None:
    found = []
    for weight in (0.0, 10.0):
        config = replace(small(GorlConfig), stage_steps=1000, latent_weight=weight, entropy_coef=0.0)
        policy = finished(begin(config=config)).policy
        mean, log_std = policy.actor(policy.encode({"state": observed()}).vec)
        found.append(float((mean.square() + (2 * log_std).exp()).mean().detach()))
    assert found[1] < min(found[0], 1) - 1e-3


def test_a_refit_moves_the_decoder_and_begins_the_encoder_anew() -> None:
    run = begin()
    before, encoder = weights(run.policy.base), weights(run.policy.actor)
    seen = run.advance()
    assert "refit/loss" not in seen and not torch.equal(weights(run.policy.actor), encoder)
    seen = run.advance()
    assert float(seen["refit/rows"]) == 8 and run.stage_start == run.progress
    assert torch.equal(weights(run.policy.actor), encoder) and not run.learner.actor_optimizer.state
    assert not torch.equal(weights(run.policy.base), before)
    assert not any(weight.requires_grad for weight in run.policy.base.parameters())
    assert not any(module.training for module in run.policy.base.modules())
    run.close()


def test_a_refit_learns_from_what_was_decoded_from_the_latents() -> None:
    run, seen = begin(), []
    collect = run.collect
    run.collect = lambda: (seen.append(collect()), seen[-1])[1]  # type: ignore[method-assign]
    run.fit_decoder = lambda *parts: (seen.append(parts), {})[1]  # type: ignore[method-assign]
    with torch.no_grad():
        run.policy.actor.trunk.layers[-1].bias.add_(0.5)  # not the noise that it begins with
    run.refit()
    rollout, (vec, chunk) = seen
    latent = rollout.record["latent"].flatten(0, 1)
    torch.testing.assert_close(chunk, run.policy.chunk_of(vec, latent), rtol=0, atol=1e-5)
    assert latent.mean() > 0.2 and not torch.allclose(chunk.flatten(1), latent, atol=1e-2)
    run.close()


def test_no_refit_ends_a_run_and_stages_are_counted_from_the_end_of_a_refit() -> None:
    run = begin()
    run.advance()
    run.advance()
    assert "refit/loss" not in run.advance(), "the refit took no steps of the next stage"
    run.close()
    run = begin(config=replace(small(GorlConfig), env_steps=run.config.stage_steps + 1))
    while run.progress < run.total:
        assert "refit/loss" not in run.advance()
    run.close()
    run = begin(config=replace(small(GorlConfig), iterations=2, stage_steps=1))
    assert ["refit/loss" in run.advance() for _ in range(2)] == [True, False]
    run.close()


def test_a_refit_makes_what_the_encoder_found_the_prior() -> None:
    """An encoder that has moved decodes other chunks; after the refit noise alone decodes them."""
    run = begin(config=replace(small(GorlConfig), refit_steps=800, refit_lr=3e-3, batch_size=256))
    generator, policy = torch.Generator().manual_seed(1), run.policy
    vec = policy.encode({"state": observed(2048)}).vec
    noise = policy.sample_noise(2048, generator=generator)
    wanted = policy.chunk_of(vec, 1.5 + 0.3 * noise.flatten(1))
    run.fit_decoder(vec, wanted)
    fresh = policy.sample_noise(2048, generator=generator)
    found, before = policy.chunk_of(vec, fresh.flatten(1)), init("flow")
    old = before.decode(before.condition(vec), fresh)
    gap, gap_before = ((one.mean(dim=0) - wanted.mean(dim=0)).abs().max() for one in (found, old))
    assert gap < 0.1 < 0.3 < gap_before
    run.close()


@pytest.mark.parametrize("after", [1, 2])
def test_a_run_is_resumed_bit_by_bit_before_and_after_a_refit(after: int) -> None:
    one, two = begin(), begin()
    for _ in range(after):
        one.advance()
    file = io.BytesIO()
    torch.save(to_plain(one.state_dict()), file)
    file.seek(0)
    two.load_state_dict(from_plain(torch.load(file, weights_only=True)))
    assert two.stage_start == one.stage_start
    assert torch.equal(weights(finished(one).policy), weights(finished(two).policy))


def test_what_has_no_latent_is_refused() -> None:
    with pytest.raises(CapabilityError, match=mentions("algo=gorl GaussianPolicy algo=ppo")):
        begin("gaussian")
    for name, value in (("bc_weight", 0.1), ("demo_weight", 0.1), ("encoder", "trained")):
        with pytest.raises(ConfigError, match=mentions(f"algo.{name}")):
            replace(small(GorlConfig), **{name: value})
