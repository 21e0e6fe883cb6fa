"""The program in C gives the numbers of plain operations, and leaves to them what it does not read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.networks import native
from policies.networks.activations import ACTIVATIONS
from policies.networks.mlp_blocks import PlainTrunk

ROWS, WIDTHS = 13, (5, 24, 17, 3)

needs_compiler = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"plain operations: {native.unavailable()}"
)


def parts_of(stack: native.Stack, seed: int = 0, widths: Sequence[int] = WIDTHS) -> list[Tensor]:
    """Return random weights, biases, scales and shifts."""
    generator, pairs = torch.Generator().manual_seed(seed), list(pairwise(widths))
    lead = () if stack.transposed and stack.members == 1 else (stack.members,)
    row = (1,) if not stack.transposed else ()
    weights = [(*lead, *(pair[::-1] if stack.transposed else pair)) for pair in pairs]
    rows = [(*lead, *row, n) for _, n in pairs]
    shapes = [*weights, *rows, *(2 * rows[:-1] if stack.has_norm else [])]
    return [(0.5 * torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes]


def entries(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTHS[0], generator=torch.Generator().manual_seed(1))


STACKS = [
    native.Stack(members, activation, has_norm, 1e-3, transposed, norm_after)
    for members, transposed in ((1, True), (1, False), (3, False))
    for activation in native.KINDS
    for has_norm, norm_after in ((False, False), (True, False), (True, True))
]


@needs_compiler
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_a_stack_and_its_gradients_are_those_of_plain_operations(stack: native.Stack) -> None:
    same_as_plain(stack, entries().requires_grad_())


@needs_compiler
@pytest.mark.parametrize("stack", STACKS[::5], ids=str)
def test_many_rows_in_blocks_are_those_of_plain_operations(stack: native.Stack) -> None:
    x, parts = entries(1300).requires_grad_(), [part.detach() for part in parts_of(stack)]
    found, expected = stack(x, parts), stack.plain(x, parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    of_found, of_plain = (torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected))
    torch.testing.assert_close(of_found, of_plain, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(stack(x, parts_of(stack)), found)
        four, groups = stack._replace(members=4), torch.stack([x, 2 * x])  # two members read a group of rows
        parts = parts_of(four)
        torch.testing.assert_close(four(groups, parts), four.plain(groups, parts), rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_members_in_groups_have_rows_of_their_own(transposed: bool, groups: int) -> None:
    stack = native.Stack(4, "relu", not transposed, 1e-3, transposed)
    x = entries(groups * ROWS).unflatten(0, (groups, ROWS)).requires_grad_()
    same_as_plain(stack, x)
    apart = [
        stack._replace(members=4 // groups)(rows, own)
        for rows, own in zip(x, split(parts_of(stack), groups), strict=True)
    ]
    torch.testing.assert_close(stack(x, parts_of(stack)), torch.cat(apart), rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("widths", [(600, 70, 8), (16, 129, 1100, 33), (40, 64, 190, 9)])
@pytest.mark.parametrize("rows", [1, 9, 64, 131])
@pytest.mark.parametrize("members", [1, 2])
def test_products_of_any_size_are_those_of_float64(widths: tuple[int, ...], rows: int, members: int) -> None:
    stack = native.Stack(members, "tanh", transposed=members == 1)
    scale = 0.5 / max(widths) ** 0.5
    parts = [(scale * part.detach()).requires_grad_() for part in parts_of(stack, widths=widths)]
    x = torch.randn(rows, widths[0], generator=torch.Generator().manual_seed(1)).requires_grad_()
    slope = torch.randn(members, rows, widths[-1], generator=torch.Generator().manual_seed(2))
    found, exact = stack(x, parts), stack.plain(x.double(), [part.double() for part in parts])
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    of_parts = [torch.autograd.grad(y, [x, *parts], slope.to(y)) for y in (found, exact)]
    for one, other in zip(*of_parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def split(parts: list[Tensor], groups: int) -> list[list[Tensor]]:
    """Return the parts of each group of members."""
    return [list(own) for own in zip(*(part.tensor_split(groups) for part in parts), strict=True)]


def same_as_plain(stack: native.Stack, x: Tensor) -> None:
    """Require the outputs and gradients of plain operations."""
    parts = parts_of(stack)
    assert native.serves(x)
    found, expected = stack(x, parts), stack.plain(x, parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(stack(x, parts), found)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    for wanted in ([x, *parts], [x], parts):
        pairs = zip(
            torch.autograd.grad(found, wanted, grad, retain_graph=True),
            torch.autograd.grad(expected, wanted, grad, retain_graph=True),
            strict=True,
        )
        for ours, plain in pairs:
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("stack", STACKS[-9:], ids=str)
def test_gradients_can_be_differentiated_again(stack: native.Stack) -> None:
    parts, found = parts_of(stack), []
    for evaluate in (stack, stack.plain):
        x = entries().requires_grad_()
        (slope,) = torch.autograd.grad(evaluate(x, parts).sum(), x, create_graph=True)
        found.append([slope, *torch.autograd.grad(slope.square().sum(), parts[: len(WIDTHS) - 1])])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_tanh_is_exact_to_rounding_and_within_one() -> None:
    one = [torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)]
    x = torch.cat([torch.linspace(-12, 12, 40_001), torch.logspace(-20, 0, 500), torch.tensor([torch.inf])])
    found = native.Stack(1, "tanh")(x.unsqueeze(1), one).flatten()
    torch.testing.assert_close(found.double(), x.double().tanh(), rtol=5e-7, atol=0)
    assert float(found.abs().max()) <= 1


@needs_compiler
@pytest.mark.parametrize("activation", sorted(set(native.KINDS) - set(native.KEEP_VALUE)))
def test_an_activation_and_its_slope_are_exact_to_rounding(activation: str) -> None:
    one = [torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)]
    x = torch.cat([torch.linspace(-30, 30, 60_001), torch.tensor([-1e30, 0.0, 1e30])]).requires_grad_()
    found = native.Stack(1, activation)(x.unsqueeze(1), one).flatten()
    (slope,) = torch.autograd.grad(found.sum(), x)
    exact = x.detach().double().requires_grad_()
    expected = ACTIVATIONS[activation][0](exact)
    (expected_slope,) = torch.autograd.grad(expected[:-3].sum(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=5e-7, atol=1e-7)
    torch.testing.assert_close(slope[:-3].double(), expected_slope[:-3], rtol=1e-6, atol=5e-7)
    assert slope[-3:].tolist() == pytest.approx([0.0, 0.6 if activation == "mish" else 0.5, 1.0], rel=1e-6)


@needs_compiler
@pytest.mark.parametrize("activation", native.KINDS)
def test_what_is_no_number_stays_none(activation: str) -> None:
    """A run that diverges must show it."""
    stack, x = native.Stack(1, activation), entries()
    x[4, 1] = torch.nan
    x.requires_grad_()
    found = stack(x, parts_of(stack))
    assert found[0, 4].isnan().all() and not found[0, :4].isnan().any()
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert not slope[:4].isnan().any() and (activation == "relu" or slope[4].isnan().all())


def mish_of_norm(x: Tensor, norm: nn.GroupNorm) -> Tensor:
    return F.mish(norm(x.transpose(1, 2))).transpose(1, 2)


@needs_compiler
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_normalisation_with_mish_is_that_of_plain_operations(spread: float) -> None:
    """Mish far to both sides of zero too."""
    generator, norm = torch.Generator().manual_seed(0), nn.GroupNorm(4, 24)
    nn.init.uniform_(norm.weight, -spread, spread, generator=generator)
    nn.init.normal_(norm.bias, generator=generator)
    x = (3 + torch.randn(5, 6, 24, generator=generator)).requires_grad_()
    inputs = [x, norm.weight, norm.bias]
    found, expected = native.norm_mish(x, norm), mish_of_norm(x, norm)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * spread)
    grad = torch.randn(expected.shape, generator=generator)
    first = torch.autograd.grad(found, inputs, grad, retain_graph=True)
    for ours, plain in zip(
        first, torch.autograd.grad(expected, inputs, grad, retain_graph=True), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=2e-5 * spread)
    if spread > 1:
        return  # stock Mish has no second derivative here
    second = []
    for value in (found, expected):
        (slope,) = torch.autograd.grad(value, x, grad, create_graph=True)
        second.append(torch.autograd.grad(slope.square().sum(), inputs))
    for ours, plain in zip(*second, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@needs_compiler
def test_what_the_program_does_not_read_is_left_to_plain_operations() -> None:
    stack = native.Stack(2, "relu")
    parts = parts_of(stack)
    turned = [part.mT.contiguous().mT for part in parts]
    torch.testing.assert_close(stack(entries(), turned), stack(entries(), parts), rtol=1e-5, atol=1e-5)
    assert stack(entries(0), parts).shape == (2, 0, WIDTHS[-1])
    for wrong in (entries()[:, 1:], entries().double()):
        with pytest.raises(RuntimeError):
            stack(wrong, parts)


@needs_compiler
def test_other_types_transforms_and_threads_are_not_served() -> None:
    x, threads = entries(), torch.get_num_threads()
    assert native.serves(x)
    assert not native.serves(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert not native.serves(x)
    seen = []
    torch.func.vmap(lambda row: seen.append(native.serves(row)) or row)(x)
    assert seen == [False]
    trunk = PlainTrunk(WIDTHS, "tanh")
    slope = torch.func.jvp(trunk, (x,), (torch.ones_like(x),))[1]
    assert slope.shape == (ROWS, WIDTHS[-1])
    try:
        torch.set_num_threads(2)
        assert not native.serves(x)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize("stack", STACKS[-2:], ids=str)
def test_shapes_that_do_not_fit_are_refused_as_by_plain_operations(stack: native.Stack) -> None:
    """Nothing is read beyond the end of a part."""
    parts = parts_of(stack)
    narrow = [*parts[:1], parts[1][:, :-1], *parts[2:]]
    for wrong in (narrow, [part.to("meta") for part in parts]):
        with pytest.raises(RuntimeError):
            stack(entries(), wrong)
    more = stack._replace(members=stack.members + 1)
    assert torch.equal(more(entries(), parts), stack.plain(entries(), parts))


@needs_compiler
def test_a_network_of_its_own_output_is_differentiated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, found = PlainTrunk((4, 8, 4), "tanh"), []
    for is_plain in (False, True):
        if is_plain:
            monkeypatch.setattr(native, "serves", lambda _: False)
        x = torch.ones(3, 4)
        slopes = torch.autograd.grad(trunk(trunk(x)).square().sum(), trunk.parameters(), create_graph=True)
        total = sum(slope.square().sum() for slope in slopes)
        found.append([*slopes, *torch.autograd.grad(total, trunk.parameters())])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("changed", [torch.zeros(1, 1), torch.zeros(8, 4).double()])
def test_weights_that_change_their_kind_before_the_gradients_are_noticed(changed: Tensor) -> None:
    stack = native.Stack(1, "relu", transposed=True)
    sizes = (8, 4), (3, 8), (8,), (3,)
    parts = [torch.randn(size, requires_grad=True) for size in sizes]
    y = stack(torch.randn(6, 4), parts).sum()
    parts[0].data = changed
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y, parts)


def test_gradients_in_batches_and_whole_graphs_are_left_to_plain_operations() -> None:
    trunk, x = PlainTrunk(WIDTHS, "relu"), entries().requires_grad_()
    out, grads = trunk(x), torch.eye(ROWS).unsqueeze(-1).expand(-1, -1, WIDTHS[-1])
    (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True)
    (whole,) = torch.autograd.grad(trunk(x).sum(), x)
    torch.testing.assert_close(found.sum(dim=0), whole)
    compiled = torch.compile(trunk, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), trunk(x))


@needs_compiler
def test_what_overflows_is_no_number() -> None:
    stack, huge = native.Stack(1, "tanh", has_norm=True), 1e30 * entries()
    assert stack(huge, parts_of(stack)).isnan().all() and stack.plain(huge, parts_of(stack)).isnan().all()
    norm = nn.GroupNorm(1, 4)
    assert native.norm_mish(1e30 * torch.randn(1, 2, 4), norm).isnan().all()
    norm.weight.data.fill_(1e38)
    x = torch.tensor([[[-1.0, 1.0, -1.0, 1.0]]])
    torch.testing.assert_close(native.norm_mish(x, norm), mish_of_norm(x, norm), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_damaged_program_is_made_again(tmp_path: Path) -> None:
    environment = os.environ | {"HOME": str(tmp_path)}
    for _ in range(2):
        told = subprocess.run([sys.executable, "-c", SAID], env=environment, capture_output=True, text=True)
        assert told.stdout.strip() == "None", told.stderr
        (program,) = (tmp_path / ".burnish" / "native").iterdir()
        assert program.stat().st_size > 1000
        program.write_bytes(b"")


SAID = "from policies.networks import native; print(native.unavailable())"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"BURNISH_NATIVE": "0"}, "BURNISH_NATIVE=0"),
        ({"PATH": ""}, "there is no C compiler"),
        ({"PATH": "BROKEN"}, "the program in C is not usable"),
    ],
    ids=["declined", "no compiler", "a compiler that fails"],
)
def test_plain_operations_serve_without_the_program(
    change: dict[str, str], reason: str, tmp_path: Path
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    change = {name: str(tmp_path) if value == "BROKEN" else value for name, value in change.items()}
    environment = os.environ | {"HOME": str(tmp_path)} | change
    told = subprocess.run(
        [sys.executable, "-c", SAID], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith(reason)
