"""What surrounds Diffusion Policy's networks: time features, averaged weights, windows, splits, normaliser.

Beyond what the package does, hence optional: `train_mask_*` (a random share of the training episodes),
`norm_*_nooff_*` (a normaliser that scales without shifting), and which episodes numpy's generator picks for
`val_mask_*`, of which the number is compared.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from official_networks import read
from torch import Tensor, nn

from algos.cloning.batches import WindowSampler
from algos.optim import Ema, PowerDecay
from envs.datasets import EpisodeDataset
from policies.networks.embeddings import sinusoid
from policies.normalizer import Normalizer
from policies.policy_config import ChunkSpec

dp_misc = pytest.mark.golden("dp_misc*.npz")
OPTIONAL = r"train_mask_.*|norm_\w+_nooff_\w+"
CHECKED = r"sinusoidal_\w+|ema_\w+|indices_\w+|val_mask_.*|norm_data|norm_(limits|gaussian)_off_\w+"


def matching(arrays: dict[str, Tensor], pattern: str) -> list[tuple[re.Match[str], Tensor]]:
    """Return the arrays whose names have a pattern, of which there must be some."""
    found = [(match, value) for name, value in arrays.items() if (match := re.fullmatch(pattern, name))]
    assert found
    return found


def episodes(values: Tensor, ends: list[int]) -> EpisodeDataset:
    """Return episodes that end before the frames `ends`, with values (N, D) as observations and actions."""
    zeros, last = np.zeros(len(values)), np.zeros(len(values), dtype=bool)
    last[np.array(ends) - 1] = True
    return EpisodeDataset.from_arrays(
        values.numpy(), values.numpy(), zeros, last, np.zeros_like(last), np.array([0, *ends])
    )


@dp_misc
def test_every_array_is_compared_or_known_to_be_optional(golden_path: Path) -> None:
    assert [name for name in read(golden_path) if not re.fullmatch(f"{CHECKED}|{OPTIONAL}", name)] == []


@dp_misc
def test_times_are_embedded_in_the_same_waves(golden_path: Path) -> None:
    arrays = read(golden_path)
    for match, expected in matching(arrays, r"sinusoidal_emb_(\d+)"):
        ours = sinusoid(arrays["sinusoidal_t"], int(match[1]))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@dp_misc
def test_averaged_weights_follow_with_the_same_decays(golden_path: Path) -> None:
    arrays, rule = read(golden_path), PowerDecay()
    source, steps = arrays["ema_source"], arrays["ema_get_decay_steps"]
    decays = [rule.decay(n) for n in range(len(source))]
    np.testing.assert_allclose(decays, arrays["ema_decay"], rtol=1e-12)
    np.testing.assert_allclose([rule.decay(int(n)) for n in steps], arrays["ema_get_decay"], rtol=1e-12)
    net = nn.Linear(source.shape[1], 1, bias=False)
    ema = Ema(net, rule)
    for weights, expected in zip(source, arrays["ema_weights"], strict=True):
        with torch.no_grad():
            net.weight.copy_(weights)
        ema.update(net)
        torch.testing.assert_close(ema.module.get_parameter("weight")[0], expected, atol=1e-6, rtol=1e-5)


@dp_misc
def test_windows_are_the_same_in_the_same_order(golden_path: Path) -> None:
    """Ours reach behind the end as far as there is an observation; theirs by `after` rows at most."""
    arrays = read(golden_path)
    ends = arrays["indices_episode_ends"].tolist()
    frames = torch.arange(float(ends[-1])).unsqueeze(1)
    for match, rows in matching(arrays, r"indices_L(\d+)_b(\d+)_a(\d+)(?:_mask(\d+))?"):
        length, before, after = (int(match[i]) for i in (1, 2, 3))
        data = episodes(frames, ends)
        if match[4] is not None:
            data = data.select(torch.tensor([i for i, kept in enumerate(match[4]) if kept == "1"]))
        chunk = ChunkSpec(1, length, 1, obs_steps=before + 1, action_start=before)
        expected, real = filled(rows, length)
        for pad_end in (True, False) if after == 0 else (True,):
            source = WindowSampler(data, chunk, pad_end=pad_end)
            batch = source.gather(torch.arange(source.num))
            overhang = batch.mask.flip(1).int().argmax(dim=1)  # rows behind the end of the episode
            kept = overhang <= after
            assert torch.equal(batch.action[kept].squeeze(2), expected)
            assert torch.equal(batch.obs["state"][kept].squeeze(2), expected[:, : before + 1])
            assert torch.equal(batch.mask[kept], real)


def filled(rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Lay samples out: rows (W, 4) of first frame, end, first place, end -> frames, recorded; (W, length)."""
    frame, place = [], torch.arange(length)
    for first, end, begin, stop in rows.tolist():
        assert end - first == stop - begin
        frame.append((place - begin + first).clamp(first, end - 1))
    real = (place >= rows[:, 2:3]) & (place < rows[:, 3:4])
    return torch.stack(frame).float(), real


@dp_misc
def test_as_many_episodes_are_held_out(golden_path: Path) -> None:
    for match, mask in matching(read(golden_path), r"val_mask_n(\d+)_r([\d.]+)_s(\d+)"):
        num = int(match[1])
        data = episodes(torch.arange(float(num)).unsqueeze(1), list(range(1, num + 1)))
        train, held_out = data.split(float(match[2]), seed=int(match[3]))
        assert held_out.num_episodes == int(mask.sum())
        assert sorted([*train.actions.flatten().tolist(), *held_out.actions.flatten().tolist()]) == [
            *range(num)
        ]


@dp_misc
@pytest.mark.parametrize("mode", ["limits", "gaussian"])
def test_features_are_normalised_alike(mode: str, golden_path: Path) -> None:
    """Results agree to 1e-5, or to float32's precision of the two terms that are added where that is coarser.

    In one column they cancel: there the recorded result of `gaussian` is itself 1.1e-5 from the exact one.
    """
    arrays = read(golden_path)
    values = arrays["norm_data"]
    scale, offset, out = (arrays[f"norm_{mode}_off_{name}"] for name in ("scale", "offset", "out"))
    statistics = episodes(values, [len(values)]).statistics()
    normalizer = Normalizer({"state": mode}, {"state": values.shape[1]}).fit(statistics)
    torch.testing.assert_close(normalizer.get_buffer("state_scale"), scale, atol=0.0, rtol=1e-6)
    torch.testing.assert_close(normalizer.get_buffer("state_offset"), offset, atol=1e-6, rtol=1e-6)
    some = values[: len(out)]
    precision = torch.finfo(torch.float32).eps * ((scale * some).abs() + offset.abs())
    tolerance = precision.clamp(min=1e-5)
    assert ((normalizer.encode("state", some) - out).abs() <= tolerance).all()
    torch.testing.assert_close(normalizer.decode("state", out), some, atol=1e-6, rtol=1e-6)
