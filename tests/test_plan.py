"""The direct path is exact: whatever it launches, stock would have launched, and where it must not, it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as profile

from smart_autotune import settings
from support import plan_kernels as kernels
from support.plan_kernels import OMITTED
from support.side_by_side import Trio, counted, named_only, patched, tensors_of_a_gpu
from support.stub_driver import StubDriver, active

EXAMPLES, STEPS = 110, 24  # a call a step, through ours twice; see MIN_CALLS
MIN_CALLS, MIN_DIRECT_SHARE = 5_000, 0.5


# ---- any call, through stock and through ours -----------------------------------------------------------------------


class Spec(NamedTuple):
    """A kernel and the values that its arguments may have; ``decides`` names the argument that picks the winner."""

    kernel: Any
    values: Mapping[str, Sequence[Any]]
    key: tuple[str, ...] = ()
    decides: str = ""


def spec(kernel: Any, *values: Sequence[Any], **options: Any) -> Spec:
    return Spec(kernel, dict(zip(kernel.arg_names, values)), **options)


ANY_INT = [kernels.INTS, kernels.SCALARS]
SPECS = [
    spec(kernels.nothing),
    spec(kernels.only_blocks),
    spec(kernels.copied, kernels.TENSORS, kernels.FEW_TENSORS, kernels.INTS, kernels.FLOATS),
    spec(kernels.copied, kernels.FEW_TENSORS, kernels.TENSORS, kernels.SCALARS, [2.0, 3], key=("n",), decides="n"),
    spec(
        kernels.optional, kernels.FEW_TENSORS, [OMITTED, *kernels.FEW_TENSORS], [OMITTED, None, *kernels.FEW_TENSORS],
        [OMITTED, 16, 1, 5, 2**40], [OMITTED, 2.5, 3], [OMITTED, False, True, 1],
    ),
    spec(
        kernels.optional, kernels.FEW_TENSORS, [OMITTED, None], [OMITTED, kernels.TENSORS[3]],
        [OMITTED, 16, 17, 1, 33], key=("n", "causal"), decides="n",
    ),
    spec(kernels.constants, kernels.FEW_TENSORS, [4, 16, 1], kernels.ALIKE),
    spec(kernels.constants, kernels.FEW_TENSORS, [4, 16, 1], kernels.CONSTANTS, key=("MODE", "n"), decides="n"),
    spec(kernels.unspecialised, kernels.FEW_TENSORS, kernels.FEW_TENSORS, *[kernels.INTS] * 3),
    spec(
        kernels.annotated, kernels.FEW_TENSORS, kernels.INTS, kernels.INTS, [True, False, 1, 0], [1.0, 2, True],
        kernels.INTS,
    ),
    spec(kernels.colliding, kernels.FEW_TENSORS, *[[1, 5, 32, 2.5]] * 13, key=("z",), decides="z"),
    spec(kernels.builtins, kernels.FEW_TENSORS, *[[1, 5, 32]] * 9, key=("repr",), decides="repr"),
    spec(kernels.reserved, [3], [1], kernels.FEW_TENSORS, [1, 16]),
    spec(kernels.underscored, kernels.FEW_TENSORS, [1, 5], [1, 16]),
]  # fmt: skip

GRIDS = [
    (3,), (2, 3), (2, 3, 4), (5, 6, 7, 8), [4], [4, 5],
    lambda meta: (meta.get("BLOCK", 9),),
    lambda meta: [len(meta), 2],
    lambda meta: (len(repr([(name, type(value).__name__) for name, value in meta.items()])),),
]  # fmt: skip


def winner_by(decides: str) -> Any:
    """The fastest block depends on whether the deciding argument is even: two winners, the same for stock and ours."""

    def time_ms(values: Mapping[str, Any]) -> float:
        value = values.get(decides)
        even = isinstance(value, (int, float)) and value % 2 == 0
        block = values.get("BLOCK", 1)
        return float(block) if even else 1000.0 / block

    return time_ms


@st.composite
def calls(draw: Any, specs: Sequence[Spec]) -> tuple[Spec, list[tuple[tuple[Any, ...], dict[str, Any], Any]]]:
    """A kernel and a run of calls that share most of their values, each passed in its own way."""
    chosen = draw(st.sampled_from(specs))
    pick = {name: st.sampled_from(values) for name, values in chosen.values.items()}
    pool = draw(st.lists(st.fixed_dictionaries(pick), min_size=1, max_size=3))
    found = []
    for _ in range(STEPS):
        given_values = draw(st.sampled_from(pool))
        values = {name: given_values[name] for name in chosen.values}  # in signature order
        if values and draw(st.integers(0, 2)) == 0:
            changed = draw(st.sampled_from(list(values)))
            values[changed] = draw(pick[changed])
            if draw(st.booleans()):
                pool.append(values)
        found.append(passed(draw, values))
    return chosen, found


def passed(draw: Any, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The values as a call passes them: some by position, the rest by keyword in some order; and a grid."""
    names = list(values)
    gap = next((i for i, name in enumerate(names) if values[name] is OMITTED), len(names))
    unnamed = [i + 1 for i, name in enumerate(names) if name in ("grid", "warmup")]  # stock's own keywords
    count = draw(st.integers(max(unnamed, default=0), gap))
    rest = [name for name in names[count:] if values[name] is not OMITTED]
    turn = draw(st.integers(0, max(len(rest) - 1, 0)))
    keywords = {name: values[name] for name in rest[turn:] + rest[:turn]}
    return tuple(values[name] for name in names[:count]), keywords, draw(st.sampled_from(GRIDS))


SEEN: Counter[str] = Counter()

exhaustive = profile(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@exhaustive
@given(run=calls(SPECS), batch=st.sampled_from(["auto", "off"]))
def test_every_call_reaches_the_launcher_as_stocks_does(device, run, batch):
    chosen, sequence = run
    with ExitStack() as scope:
        driver = scope.enter_context(active(StubDriver(120)))
        scope.enter_context(settings.override(strict=True, batch=batch))
        scope.enter_context(named_only())
        scope.enter_context(tensors_of_a_gpu() if device == "gpu" else nullcontext())
        scope.enter_context(patched())
        full = scope.enter_context(counted())
        trio = Trio(driver, chosen.kernel, chosen.key, configs_of(chosen), winner_by(chosen.decides))
        for args, kwargs, grid in sequence:
            outcome = trio.run(args, kwargs, grid)
            SEEN["calls"] += 2
            SEEN["refused"] += 2 * (outcome.error is not None)
        SEEN["full path"] += full.of(trio.decorated) + full.of(trio.patched)


def test_the_calls_above_were_many_and_most_of_them_direct():
    if not SEEN:
        pytest.skip("the property tests did not run")
    direct = SEEN["calls"] - SEEN["full path"]
    print(f"{SEEN['calls']} calls, {direct} direct, {SEEN['refused']} refused by stock")
    assert SEEN["calls"] >= MIN_CALLS
    assert direct >= MIN_DIRECT_SHARE * SEEN["calls"]
    assert SEEN["refused"] < 0.2 * SEEN["calls"]


def configs_of(chosen: Spec) -> list[Any]:
    import triton

    names = chosen.kernel.arg_names
    if "BLOCK" not in names:
        return [triton.Config({}, num_warps=warps) for warps in (4, 8)]
    return [triton.Config({"BLOCK": size}) for size in (64, 128, 32)]
