"""Time embeddings follow the published formula."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from policies.networks.embeddings import PositionalEmbedding, TimeEmbedding, UniformEmbedding, sinusoid


def test_sinusoid_matches_the_formula_sines_first() -> None:
    time, dim = torch.tensor([0.0, 1.0, 7.5, 99.0], dtype=torch.float64), 8
    out = sinusoid(time, dim)
    for row, t in zip(out, time.tolist(), strict=True):
        angles = [t * 10000 ** (-j / (dim // 2 - 1)) for j in range(dim // 2)]
        expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64))


def test_time_embedding_is_linear_mish_linear_of_the_sinusoid() -> None:
    net = TimeEmbedding(6)
    time = torch.arange(5.0)
    hidden = F.mish(sinusoid(time, 6) @ net.linear1.weight.t() + net.linear1.bias)
    torch.testing.assert_close(net(time), hidden @ net.linear2.weight.t() + net.linear2.bias)
    assert net.linear1.out_features == 12


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_times_of_any_type_give_the_type_of_the_weights(dtype: torch.dtype) -> None:
    net = TimeEmbedding(4).double()
    out = net(torch.arange(3, dtype=dtype))
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, net(torch.arange(3, dtype=torch.float64)))


def test_uniform_frequencies_run_from_0_to_100_sines_first() -> None:
    time = torch.tensor([0.0, 0.9, 1.0], dtype=torch.float64)
    angle = time[:, None] * torch.tensor([0.0, 50.0, 100.0])
    out = UniformEmbedding(6).double()(time)
    torch.testing.assert_close(out, torch.cat([angle.sin(), angle.cos()], dim=1))


def test_a_positional_embedding_is_linear_gelu_linear_of_waves_cosines_first() -> None:
    net, time = PositionalEmbedding(8).double(), torch.tensor([0.0, 0.9, 7.0], dtype=torch.float64)
    angle = time[:, None] * torch.tensor([1.0, 10000**-0.5])
    waves = torch.cat([angle.cos(), angle.sin()], dim=1)
    hidden = F.gelu(waves @ net.linear1.weight.t() + net.linear1.bias)
    torch.testing.assert_close(net(time), hidden @ net.linear2.weight.t() + net.linear2.bias)
    assert net.linear1.out_features == 32
