"""Laws of every registered encoder, and what image encoders do to pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import everything, pairwise, repeated
from small_policies import ACTION_DIM, GOAL_DIM, OBS_DIM, statistics
from torch import Tensor, nn

from policies import registry
from policies.backbones.mlp import MlpConfig
from policies.backbones.transformer import TransformerConfig
from policies.build import build_policy
from policies.encoders import Encoder, ObservationSizes
from policies.encoders.images import centre_crop, random_crop, random_shift, windows
from policies.encoders.resnet import ResNet18, ResNetEncoderConfig, spatial_softmax
from policies.encoders.state import StateEncoderConfig
from policies.encoders.vit import VitEncoderConfig
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.networks.attention import set_attention
from policies.networks.heads import CriticConfig
from policies.policy import Policy, PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.processes.gaussian import GaussianProcess
from policies.storage.policy_folder import load_policy, save_policy

IMAGES = {"wrist": (40, 44, 3), "front": (40, 44, 3)}
FEATURES = 6
RESNET = ResNetEncoderConfig(width=16, keypoints=5, features=FEATURES)
VIT = VitEncoderConfig(width=16, features=FEATURES)
ENCODERS: dict[str, Any] = {
    "state": StateEncoderConfig(),
    "resnet": RESNET,
    "resnet-shared": replace(RESNET, shared=True),
    "vit": VIT,
    "vit-tokens": replace(VIT, tokens=True, state_dims=(7, 5)),
}
every_encoder = pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS.keys())
every_image_encoder = pytest.mark.parametrize(
    "encoder", list(ENCODERS.values())[1:], ids=list(ENCODERS.keys())[1:]
)


COMPILED = list(ENCODERS) if everything else ["vit-tokens"]
"""One of attention, with the option that changes its graph; a convolutional one is exported."""


def test_every_registered_encoder_is_tested_here() -> None:
    assert {type(encoder) for encoder in ENCODERS.values()} == set(registry.parts("encoder").values())


# -- inputs ---------------------------------------------------------------------------------------------


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bytes_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=seeded(seed), dtype=torch.uint8)


def build(
    encoder: Any, obs_steps: int = 1, *, images: Any = IMAGES, goal_dim: int = 0, process: Any = None
) -> Policy:
    """Build a small policy, with weights away from where they start, which may be zero."""
    attends = getattr(encoder, "tokens", False)
    backbone = TransformerConfig(width=16, depth=1, heads=2, time_dim=8) if attends else MlpConfig(width=16)
    config = PolicyConfig(process, encoder, backbone, obs_steps=obs_steps)
    sizes = {"obs_dim": OBS_DIM, "action_dim": ACTION_DIM, "goal_dim": goal_dim, "images": images}
    policy = build_policy(config, **sizes, statistics=statistics(), seed=1)
    generator = seeded(2)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return policy.eval()


def observe(policy: Policy, batch: int, seed: int = 0) -> dict[str, Tensor]:
    steps = policy.chunk.obs_steps
    obs = {"state": 3.0 + torch.randn(batch, steps, OBS_DIM, generator=seeded(seed))}
    if policy.goal_dim:
        obs["goal"] = 3.0 + torch.randn(batch, policy.goal_dim, generator=seeded(seed + 1))
    images = {camera: bytes_of(batch, steps, *IMAGES[camera], seed=seed + 2) for camera in policy.images}
    return obs | images


# -- laws of every encoder ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoder", "obs_steps", "goal_dim"), pairwise(ENCODERS.values(), [1, 2, 3], [0, GOAL_DIM])
)
def test_shapes_at_every_batch(encoder: Any, obs_steps: int, goal_dim: int) -> None:
    policy = build(encoder, obs_steps, goal_dim=goal_dim)
    assert isinstance(policy.encoder, Encoder)
    assert (policy.obs_dim, policy.goal_dim) == (OBS_DIM, goal_dim)
    for batch in (0, 1, 3):
        obs = observe(policy, batch)
        cond = policy.encode(obs)
        assert cond.vec.shape == (batch, policy.encoder.cond_dim) and cond.vec.isfinite().all()
        if policy.encoder.token_dim:
            assert cond.tokens is not None and cond.tokens.shape[::2] == (batch, policy.encoder.token_dim)
        else:
            assert cond.tokens is None
        assert policy.act(obs, generator=seeded()).shape == (batch, policy.chunk.act_steps, ACTION_DIM)


@every_encoder
def test_the_condition_reaches_exactly_the_weights_of_the_encoder(encoder: Any) -> None:
    policy = build(encoder, obs_steps=2, goal_dim=GOAL_DIM).train()
    inner: Any = policy.encoder
    cond = policy.encode(observe(policy, 3), generator=seeded())
    parts = [cond.vec] if cond.tokens is None else [cond.vec, cond.tokens]
    weighed = [(part * torch.randn(part.shape, generator=seeded(4))).sum() for part in parts]
    own = dict(inner.named_parameters())
    if own:
        sum(weighed, torch.zeros(())).backward()
    reached = {name for name, weight in policy.named_parameters() if weight.grad is not None}
    assert reached == {f"encoder.{name}" for name in own}
    assert all(weight.grad.abs().max() > 0 for weight in own.values())


@every_encoder
@pytest.mark.parametrize("process", [None, GaussianProcess()], ids=["diffusion", "gaussian"])
def test_the_loss_reaches_every_weight_that_is_not_frozen(encoder: Any, process: Any) -> None:
    if process is not None and getattr(encoder, "tokens", False):
        encoder = replace(encoder, tokens=False)
    policy = build(encoder, process=process).train()
    named = dict(policy.named_parameters())
    for name in list(named)[::2]:
        named[name].requires_grad_(False)
    action = torch.rand(7, *policy.chunk.shape, generator=seeded(5)) * 2 - 1
    te = policy.sample_te(7, generator=seeded(6))  # type: ignore[attr-defined]
    policy.matching_loss(policy.encode(observe(policy, 7)), action, te).sum().backward()  # type: ignore[attr-defined]
    reached = {name for name, weight in named.items() if weight.grad is not None and weight.grad.any()}
    assert reached == {name for name, weight in named.items() if weight.requires_grad}


@every_encoder
def test_rows_do_not_see_each_other(encoder: Any) -> None:
    policy = build(encoder, obs_steps=2)
    obs = observe(policy, 4)
    whole = policy.encode(obs).vec
    rows = [policy.encode({name: value[i : i + 1] for name, value in obs.items()}).vec for i in range(4)]
    torch.testing.assert_close(torch.cat(rows), whole, atol=1e-5, rtol=1e-5)
    seen = {name: (obs[name].float() / 255).requires_grad_() for name in policy.images}
    vec = policy.encode(obs | seen, generator=seeded()).vec
    for grad in torch.autograd.grad(vec[1].sum(), list(seen.values())) if seen else ():
        assert bool((grad[[0, 2, 3]] == 0).all()) and bool(grad[1].any())


@every_encoder
def test_an_observation_is_encoded_once_per_action(encoder: Any) -> None:
    policy = build(encoder, process=VPDiffusion(num_levels=7))
    calls: list[int] = []
    inner: Any = policy.encoder
    inner.register_forward_hook(lambda *_: calls.append(1))
    for count in (1, 2):
        policy.act(observe(policy, 2), generator=seeded())
        assert policy.table.num_steps == 7 and len(calls) == count  # type: ignore[attr-defined]


@every_encoder
def test_the_goal_comes_last_and_can_be_taken_away_without_encoding_again(encoder: Any) -> None:
    policy = build(encoder, goal_dim=GOAL_DIM)
    obs = observe(policy, 3)
    other = policy.encode(obs | {"goal": obs["goal"] + 1})
    policy.config.goal_dropout = 0.5
    calls: list[int] = []
    inner: Any = policy.encoder
    inner.register_forward_hook(lambda *_: calls.append(1))
    cond = policy.encode(obs)
    assert len(calls) == 1 and cond.free is not None
    goal = policy.normalizer.encode("goal", obs["goal"])
    assert torch.equal(cond.vec[:, -GOAL_DIM:], goal) and not cond.free.vec[:, -GOAL_DIM:].any()
    for without in (cond.free, other):
        assert torch.equal(without.vec[:, :-GOAL_DIM], cond.vec[:, :-GOAL_DIM])
        assert cond.tokens is None or torch.equal(without.tokens, cond.tokens)


@every_encoder
def test_only_a_generator_augments_and_it_alone_decides_how(encoder: Any) -> None:
    policy = build(encoder)
    obs, state = observe(policy, 3), torch.get_rng_state()
    plain = policy.encode(obs).vec
    assert torch.equal(policy.train().encode(obs).vec, plain)
    augmented = policy.encode(obs, generator=seeded(3)).vec
    assert torch.equal(policy.eval().encode(obs, generator=seeded(3)).vec, augmented)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(augmented, plain) is (not policy.images)
    if policy.images:
        assert not torch.equal(policy.encode(obs, generator=seeded(4)).vec, augmented)


@every_encoder
def test_a_saved_policy_returns_bit_by_bit(encoder: Any, tmp_path: Path) -> None:
    policy = build(encoder, obs_steps=2, goal_dim=GOAL_DIM)
    again = load_policy(save_policy(policy, tmp_path / "policy"))
    obs, noise = observe(policy, 3), policy.sample_noise(3, generator=seeded())
    assert again.config.encoder == encoder and again.images == policy.images
    assert list(again.images) == list(policy.images)
    assert torch.equal(again.act(obs, noise=noise), policy.act(obs, noise=noise))
    assert all(camera in (tmp_path / "policy" / "README.md").read_text() for camera in policy.images)


@every_encoder
def test_in_double_precision_all_of_it_is(encoder: Any) -> None:
    policy = build(encoder).double()
    arrays = {name: value.numpy() for name, value in observe(policy, 2).items()}
    obs = policy.observation(arrays)
    assert policy.encode(obs).vec.dtype == torch.float64
    single = policy.float().encode(policy.observation(arrays)).vec
    torch.testing.assert_close(policy.double().encode(obs).vec.float(), single, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_encoder_is_one_graph_with_the_same_numbers(name: str) -> None:
    policy = build(ENCODERS[name], obs_steps=2)
    obs = observe(policy, 3)
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(policy.encode, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(obs).vec, policy.encode(obs).vec, atol=1e-5, rtol=1e-5)


# -- the state encoder ----------------------------------------------------------------------------------


def test_the_state_encoder_is_the_default_has_no_weights_and_sees_no_images() -> None:
    named, default = build(StateEncoderConfig(), obs_steps=2, goal_dim=GOAL_DIM), build(None, 2, goal_dim=3)
    assert named.config == default.config and named.images == {}
    assert list(named.state_dict()) == list(default.state_dict())
    assert not [name for name in named.state_dict() if name.startswith("encoder")]
    obs = observe(named, 3)
    state = named.normalizer.encode("state", obs["state"]).flatten(1)
    expected = torch.cat([state, named.normalizer.encode("goal", obs["goal"])], dim=1)
    assert torch.equal(named.encode(obs).vec, expected)
    assert torch.equal(default.encode(obs | {"front": bytes_of(3, 2, 40, 44, 3)}).vec, expected)


def test_a_directory_that_names_no_encoder_has_the_state_encoder(tmp_path: Path) -> None:
    policy = build(None)
    path = save_policy(policy, tmp_path / "policy") / "config.json"
    description = json.loads(path.read_text())
    del description["parts"]["encoder"], description["images"]
    path.write_text(json.dumps(description))
    (path.parent / "SHA256SUMS").unlink()
    again = load_policy(tmp_path / "policy")
    obs, noise = observe(policy, 2), policy.sample_noise(2, generator=seeded())
    assert again.config.encoder == StateEncoderConfig()
    assert torch.equal(again.act(obs, noise=noise), policy.act(obs, noise=noise))


@pytest.mark.parametrize("images", [{"front": [40, 44]}, {"front": "large"}, [1], 7, {"wrist": [40, 44, 3]}])
def test_a_directory_with_impossible_images_is_refused(images: Any, tmp_path: Path) -> None:
    path = save_policy(build(replace(VIT, cameras=("front",))), tmp_path / "policy") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"images": images}))
    with pytest.raises(CheckpointError, match="does not describe a policy"):
        load_policy(tmp_path / "policy")


# -- cameras --------------------------------------------------------------------------------------------


@every_image_encoder
def test_bytes_and_numbers_between_zero_and_one_are_the_same_image(encoder: Any) -> None:
    policy = build(encoder)
    obs = observe(policy, 2)
    numbers = {camera: obs[camera].float() / 255 for camera in policy.images}
    for other in (numbers, {camera: value.double().numpy() for camera, value in numbers.items()}):
        seen = policy.observation(obs | other)
        torch.testing.assert_close(policy.encode(seen).vec, policy.encode(obs).vec, atol=1e-5, rtol=1e-5)
    assert policy.observation(obs)["front"].dtype == torch.uint8


@every_image_encoder
def test_cameras_stand_in_order_of_their_names_or_as_they_were_chosen(encoder: Any) -> None:
    policy = build(encoder)
    assert list(policy.images) == ["front", "wrist"]
    swapped = build(replace(encoder, cameras=("wrist", "front")))
    assert list(swapped.images) == ["wrist", "front"]
    one = build(replace(encoder, cameras=("wrist",)))
    assert list(one.images) == ["wrist"]
    assert policy.encoder.cond_dim - one.encoder.cond_dim == FEATURES
    obs = observe(policy, 2)
    assert torch.equal(one.encode(obs).vec, one.encode({k: obs[k] for k in ("state", "wrist")}).vec)
    changed = obs | {"front": bytes_of(2, 1, *IMAGES["front"], seed=9)}
    assert torch.equal(one.encode(changed).vec, one.encode(obs).vec)
    front, wrist = (slice(0, FEATURES), slice(FEATURES, 2 * FEATURES))
    moved = policy.encode(changed).vec != policy.encode(obs).vec
    assert moved[:, front].any() and not moved[:, wrist].any()


def test_shared_networks_see_equal_images_alike_and_others_do_not() -> None:
    obs = observe(build(RESNET), 2)
    obs["wrist"] = obs["front"]
    for encoder, num_nets in ((RESNET, 2), (replace(RESNET, shared=True), 1)):
        policy = build(encoder)
        vec, inner = policy.encode(obs).vec, policy.encoder
        assert len(inner.nets) == num_nets  # type: ignore[attr-defined]
        one, other = vec[:, :FEATURES], vec[:, FEATURES : 2 * FEATURES]
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6) is (num_nets == 1)


def test_the_residual_network_puts_what_belongs_to_a_step_side_by_side() -> None:
    policy = build(replace(RESNET, cameras=("front",)), obs_steps=3, goal_dim=GOAL_DIM)
    obs = observe(policy, 2)
    steps, goal = policy.encode(obs).vec.split((3 * (FEATURES + OBS_DIM), GOAL_DIM), dim=1)
    by_step = steps.unflatten(1, (3, FEATURES + OBS_DIM))
    assert torch.equal(by_step[..., FEATURES:], policy.normalizer.encode("state", obs["state"]))
    assert torch.equal(goal, policy.normalizer.encode("goal", obs["goal"]))
    one = build(replace(RESNET, cameras=("front",)), obs_steps=1)
    one.encoder.load_state_dict(policy.encoder.state_dict())  # type: ignore[attr-defined]
    alone = one.encode({"state": obs["state"][:, 1:2], "front": obs["front"][:, 1:2]}).vec
    torch.testing.assert_close(alone, by_step[:, 1], atol=1e-6, rtol=1e-5)


def test_patches_are_tokens_of_every_camera() -> None:
    policy = build(ENCODERS["vit-tokens"])
    obs = observe(policy, 2)
    cond = policy.encode(obs)
    assert cond.tokens is not None and cond.tokens.shape == (2, 2 * 4 * 4, 16)
    other = policy.encode(obs | {"wrist": bytes_of(2, 1, *IMAGES["wrist"], seed=9)}).tokens
    assert other is not None
    moved = (other != cond.tokens).any(dim=2)
    assert not moved[:, :16].any() and moved[:, 16:].all()
    with pytest.raises(CapabilityError, match="backbone=mlp cannot attend to tokens"):
        build_policy(
            PolicyConfig(encoder=replace(VIT, tokens=True)),
            obs_dim=OBS_DIM, action_dim=ACTION_DIM, images=IMAGES,
        )  # fmt: skip


@pytest.mark.parametrize("size", [(16, 16), (32, 32), (40, 44), (84, 96), (96, 96), (97, 103)])
def test_the_patches_of_any_size_are_counted_right(size: tuple[int, int]) -> None:
    encoder = VIT.build(ObservationSizes(OBS_DIM, images={"front": (*size, 3)}))
    vit = encoder.vit
    patches = vit.stem2(vit.stem1(torch.zeros(1, 3, *size))).flatten(2).shape[2]
    assert vit.positions.shape[1] == patches and (size != (96, 96) or patches == 121)


def test_a_policy_and_a_critic_of_pixels_have_the_published_sizes() -> None:
    config = PolicyConfig(encoder=VitEncoderConfig(), backbone=MlpConfig(time_dim=32))
    policy = build_policy(config, obs_dim=9, action_dim=7, images={"wrist": (96, 96, 3)})
    critic = CriticConfig().build(policy.encoder.cond_dim)
    inner: Any = policy.encoder
    num_actor, num_encoder, num_critic = (
        sum(weight.numel() for weight in part.parameters()) for part in (policy, inner, critic)
    )
    assert (num_actor, num_encoder + num_critic) == (1_064_956, 586_881)  # DPPO's, on can


def test_attention_of_an_encoder_can_be_computed_plainly() -> None:
    policy = build(VIT)
    obs = observe(policy, 2)
    fused = policy.encode(obs).vec
    set_attention(policy, "math")
    torch.testing.assert_close(policy.encode(obs).vec, fused, atol=1e-6, rtol=1e-5)


# -- refusals -------------------------------------------------------------------------------------------


@every_image_encoder
def test_an_observation_that_does_not_fit_is_refused_by_name(encoder: Any) -> None:
    policy = build(encoder, obs_steps=2)
    obs = observe(policy, 2)
    with pytest.raises(ConfigError, match=r"needs the observation 'front' \('B', 2, 40, 44, 3\); got keys"):
        policy.act({name: value for name, value in obs.items() if name != "front"})
    for wrong in (obs["front"][:, :1], obs["front"][:, :, 1:], obs["front"].permute(0, 1, 4, 2, 3)):
        with pytest.raises(ConfigError, match=r"observation 'front' must have shape"):
            policy.act(obs | {"front": wrong})
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(ConfigError, match=rf"'front' must be uint8, or floating point.*got {dtype}"):
            policy.act(obs | {"front": obs["front"].to(dtype)})


@pytest.mark.parametrize(
    ("encoder", "images", "message"),
    [
        (RESNET, {}, "needs images; got none"),
        (VIT, None, "needs images; got none"),
        (replace(VIT, cameras=("top",)), IMAGES, r"cameras that there are \(front, wrist\); got top"),
        (replace(VIT, cameras=("front",) * 2), IMAGES, "must be distinct"),
        (VIT, {"goal": (40, 40, 3)}, "cannot be called 'goal'"),
        (VIT, {"depth": (40, 40, 1)}, r"'depth' must have shape \(H, W, 3\); got \(40, 40, 1\)"),
        (VIT, {"tiny": (15, 40, 3)}, "at least 16 x 16 pixels; got 15 x 40"),
        (VIT, {"a": (40, 40, 3), "b": (48, 40, 3)}, "images of one size"),
        (RESNET, {"tiny": (36, 36, 3)}, "has 36 x 36, of which .* leaves 32 x 32"),
    ],
)  # fmt: skip
def test_images_that_an_encoder_cannot_see_are_refused_when_it_is_built(
    encoder: Any, images: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(encoder, images=images)


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (ResNetEncoderConfig, {"width": 24}, r"encoder\.width must be a multiple of 16; got 24"),
        (VitEncoderConfig, {"heads": 3}, r"encoder\.heads must be a divisor of encoder\.width=128 .*; got 3"),
    ],
)
def test_values_out_of_range_are_refused_with_their_key(part: type, values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        part(**values)


# -- pixels ---------------------------------------------------------------------------------------------


def padded_window(image: np.ndarray, top: int, left: int, size: tuple[int, int], pad: int) -> np.ndarray:
    """Cut a window out of one image (H, W, 3) with repeated edges, the slow way."""
    wide = np.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode="edge")
    return wide[top + pad : top + pad + size[0], left + pad : left + pad + size[1]]


@pytest.mark.parametrize("size", [(9, 7), (5, 6)])
def test_windows_are_those_of_brute_force(size: tuple[int, int]) -> None:
    images = bytes_of(20, 2, 9, 7, 3)
    top, left = torch.randint(-4, 5, (2, 20), generator=seeded(1))
    found = windows(images, top, left, size)
    for i in range(20):
        for step in range(2):
            expected = padded_window(images[i, step].numpy(), int(top[i]), int(left[i]), size, 8)
            assert np.array_equal(found[i, step].numpy(), expected)


def test_random_shifts_reach_every_offset_and_treat_a_history_alike() -> None:
    pad, n = 2, 400
    images = bytes_of(1, 1, 8, 8, 3).expand(n, 3, 8, 8, 3)
    shifted = random_shift(images, pad, seeded())
    assert torch.equal(shifted, random_shift(images, pad, seeded()))
    assert torch.equal(shifted[:, 0], shifted[:, 1]) and torch.equal(shifted[:, 0], shifted[:, 2])
    offsets = [(top, left) for top in range(-pad, pad + 1) for left in range(-pad, pad + 1)]
    possible = [padded_window(images[0, 0].numpy(), *offset, (8, 8), pad) for offset in offsets]
    counts = np.zeros(len(offsets))
    for one in shifted[:, 0].numpy():
        (which,) = [i for i, window in enumerate(possible) if np.array_equal(window, one)]
        counts[which] += 1
    assert counts.min() > 0 and counts.sum() == n


def test_random_crops_reach_every_place_and_the_middle_is_one_of_them() -> None:
    size, n = (6, 5), 300
    images = bytes_of(1, 1, 8, 9, 3).expand(n, 2, 8, 9, 3)
    crops = random_crop(images, size, seeded())
    assert torch.equal(crops[:, 0], crops[:, 1])
    places = [(top, left) for top in range(3) for left in range(5)]
    possible = [images[0, 0, top : top + 6, left : left + 5] for top, left in places]
    found = [next(i for i, window in enumerate(possible) if torch.equal(window, one)) for one in crops[:, 0]]
    assert set(found) == set(range(len(places)))
    assert torch.equal(centre_crop(images, size)[0, 0], possible[places.index((1, 2))])


def test_without_a_margin_augmentation_changes_nothing() -> None:
    for encoder in (replace(RESNET, crop=1.0), replace(VIT, shift=0)):
        policy = build(encoder)
        obs = observe(policy, 2)
        assert torch.equal(policy.encode(obs, generator=seeded()).vec, policy.encode(obs).vec)


def test_a_crop_of_84_pixels_is_the_published_one() -> None:
    encoder = ResNetEncoderConfig().build(ObservationSizes(9, 2, images={"front": (84, 84, 3)}))
    assert encoder.crops == {"front": (76, 76)} and encoder.cond_dim == 2 * (64 + 9)
    wide = ResNetEncoderConfig(width=16).build(ObservationSizes(9, images={"front": (240, 320, 3)}))
    assert wide.crops == {"front": (216, 288)}


# -- the residual network -------------------------------------------------------------------------------


def test_the_residual_network_has_the_published_size_and_group_norms_only() -> None:
    trunk = ResNet18(64)
    classifier = 512 * 1000 + 1000
    assert sum(weight.numel() for weight in trunk.parameters()) == 11_689_512 - classifier
    norms = [part for part in trunk.modules() if "Norm" in type(part).__name__]
    assert len(norms) == 20 and all(isinstance(norm, nn.GroupNorm) for norm in norms)
    assert {norm.num_channels // norm.num_groups for norm in norms} == {16}  # type: ignore[union-attr]
    assert not list(trunk.buffers())
    with torch.no_grad():
        assert trunk(torch.zeros(1, 3, 76, 76)).shape == (1, 512, 3, 3)


def plain_resnet(trunk: ResNet18, x: Tensor) -> Tensor:
    """Evaluate the 18 layers one after the other, from the table of the publication."""
    normal = torch.nn.functional.group_norm

    def layer(h: Tensor, conv: Any, norm: Any, stride: int, pad: int) -> Tensor:
        out = torch.nn.functional.conv2d(h, conv.weight, None, stride, pad)
        return normal(out, out.shape[1] // 16, norm.weight, norm.bias)

    h = torch.nn.functional.max_pool2d(layer(x, trunk.stem, trunk.norm, 2, 3).relu(), 3, 2, 1)
    for i, stride in enumerate((1, 1, 2, 1, 2, 1, 2, 1)):
        block: Any = trunk.blocks[i]
        inner = layer(layer(h, block.conv1, block.norm1, stride, 1).relu(), block.conv2, block.norm2, 1, 1)
        h = (inner + (h if stride == 1 else layer(h, *block.shortcut, stride, 0))).relu()
    return h


def test_the_residual_network_is_the_published_one() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trunk = ResNet18(16)
    x = torch.randn(2, 3, 47, 60, generator=seeded())
    torch.testing.assert_close(trunk(x), plain_resnet(trunk, x))
    assert trunk(x).shape == (2, 128, 2, 2)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, 4), (1, 2), (2, 0)])
def test_a_peak_is_where_it_is(row: int, column: int) -> None:
    maps = torch.zeros(1, 2, 3, 5)
    maps[0, 0, row, column] = 200.0
    place, middle = spatial_softmax(maps)[0]
    torch.testing.assert_close(place, torch.tensor([column / 2 - 1, row - 1.0]))
    torch.testing.assert_close(middle, torch.zeros(2))


def test_two_peaks_share_their_place_by_their_heights() -> None:
    maps = torch.full((1, 1, 2, 3), -torch.inf)
    maps[0, 0, 0, 0], maps[0, 0, 1, 2] = np.log(3.0), 0.0  # shares 3/4 and 1/4
    torch.testing.assert_close(spatial_softmax(maps)[0, 0], torch.tensor([-0.5, -0.5]))


# -- export ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("encoder", repeated([replace(RESNET, cameras=("front",)), VIT]))
def test_an_exported_policy_sees_the_same_images(encoder: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from policies.export.export import export_onnx

    policy = build(encoder, obs_steps=2, goal_dim=GOAL_DIM, process=GaussianProcess())
    report = export_onnx(policy, tmp_path / "out", latency_batches=())
    assert report.worst <= 1e-5
    described = json.loads((tmp_path / "out" / "signature.json").read_text())["inputs"]
    assert list(described) == ["observation", "noise", "goal", *policy.images]
    assert described["front"] == {
        "shape": ["B", 2, 40, 44, 3], "dtype": "uint8", "units": "0 to 255, red green blue"
    }  # fmt: skip
    session = runtime.InferenceSession(str(tmp_path / "out" / "policy.onnx"))
    obs = observe(policy, 5)
    given = obs | {"observation": obs["state"], "noise": torch.zeros(5, *policy.noise_shape)}
    (found,) = session.run(["action"], {node.name: given[node.name].numpy() for node in session.get_inputs()})
    np.testing.assert_allclose(found, policy.act(obs).numpy(), atol=1e-5, rtol=0)
