from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from smart_autotune.audit import audit
from smart_autotune.kernels import sparse_decode
from smart_autotune.kernels.sparse_decode import launcher, tuning
from smart_autotune.kernels.sparse_decode.layout import random_cache
from smart_autotune.verdict import Outcome


def config(block_t: int, block_h: int, waves: int) -> triton.Config:
    return triton.Config({"BLOCK_T": block_t, "BLOCK_H": block_h, "HEADS_FIRST": False, "AHEAD": True, "WAVES": waves})


@pytest.mark.parametrize(
    ("rows", "heads", "widths", "block_t", "block_h", "waves", "splits"),
    [
        (1, 8, (512, 0), 64, 8, 2, 8),  # one block a part at least
        (1, 8, (100, 30), 64, 8, 2, 3),  # each list ends with a block of its own
        (32, 8, (128, 512), 32, 8, 2, 8),
        (128, 8, (128, 512), 32, 8, 4, 4),
        (128, 16, (128, 512), 32, 8, 4, 2),  # two head tiles share the multiprocessors
        (192, 16, (128, 512), 16, 16, 4, 2),  # 2.75 rounded down: a third would start a second round
        (96, 8, (128, 512), 32, 8, 1, 1),
        (256, 64, (128, 512), 32, 16, 4, 1),  # the rows fill the GPU alone
        (1, 8, (128, 8256), 32, 8, 4, 64),
        (1, 1, (1, 0), 32, 8, 4, 1),
        (0, 1, (1, 0), 32, 8, 4, 1),
    ],
)
def test_splits_give_a_multiprocessor_its_waves(
    rows: int, heads: int, widths: tuple[int, int], block_t: int, block_h: int, waves: int, splits: int
) -> None:
    assert launcher.choose_splits(rows, heads, *widths, 132, config(block_t, block_h, waves)) == splits


def test_widths_round_to_few_values() -> None:
    assert [tuning.rounded_width(width) for width in (0, 1, 100, 128, 192, 8256)] == [0, 1, 128, 128, 256, 16384]


@pytest.mark.parametrize(
    ("heads", "blocks"),
    [(1, {8}), (8, {8}), (16, {8, 16}), (17, {16}), (32, {16}), (64, {16, 64}), (128, {16, 64})],
)
def test_head_blocks_follow_the_head_count(heads: int, blocks: set[int]) -> None:
    kept = tuning.drop_unsuited_head_blocks(tuning.CONFIGS, {"num_heads": heads})
    assert {config.kwargs["BLOCK_H"] for config in kept} == blocks


def test_pruning_leaves_one_config() -> None:
    wide = [config for config in tuning.CONFIGS if config.kwargs["BLOCK_H"] >= 16]
    kept = tuning.drop_unsuited_head_blocks(wide, {}, num_heads=1)
    assert [config.kwargs["BLOCK_H"] for config in kept] == [16]


@pytest.mark.parametrize(("cache_tokens", "distinct"), [(10_000, "everywhere"), (150, "in a row"), (50, "nowhere")])
def test_random_tokens_repeat_only_when_the_cache_is_small(cache_tokens: int, distinct: str) -> None:
    tokens = tuning.random_tokens(4, 100, cache_tokens, torch.device("cpu"))
    assert tokens.shape == (4, 100) and tokens.dtype == torch.int32
    assert int(tokens.min()) >= 0 and int(tokens.max()) < cache_tokens
    assert (tokens.unique().numel() == 400) == (distinct == "everywhere")
    assert all((row.unique().numel() == 100) == (distinct != "nowhere") for row in tokens)
    assert torch.equal(tokens, tuning.random_tokens(4, 100, cache_tokens, torch.device("cpu")))


def named_args(indices: torch.Tensor, lengths: torch.Tensor | None, extra: torch.Tensor | None) -> dict[str, Any]:
    return {
        "cache_ptr": random_cache(8, 64),
        "indices_ptr": indices,
        "length_ptr": lengths,
        "topk": indices.shape[-1],
        "PAGE_SIZE": 64,
        "extra_cache_ptr": None if extra is None else random_cache(40, 2),
        "extra_indices_ptr": extra,
        "extra_length_ptr": None,
        "extra_topk": 0 if extra is None else extra.shape[-1],
        "EXTRA_PAGE_SIZE": 2,
    }


def test_timing_uses_full_lists_and_leaves_the_call_alone() -> None:
    indices, lengths = torch.zeros(3, 1, 100, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    replaced = tuning.full_lists(named_args(indices, lengths, torch.full((3, 1, 20), -1, dtype=torch.int32)))
    assert replaced.keys() == {"indices_ptr", "length_ptr", "extra_indices_ptr"}
    assert replaced["length_ptr"].tolist() == [100] * 3
    assert replaced["indices_ptr"].unique().numel() == 300
    assert replaced["extra_indices_ptr"].unique().numel() == 60
    assert not indices.any() and lengths.tolist() == [1] * 3


def test_timing_lists_keep_the_row_stride_that_the_kernel_was_given() -> None:
    wide = torch.zeros(3, 1, 300, dtype=torch.int32)[:, :, :100]
    replaced = tuning.full_lists(named_args(wide, None, None))
    assert replaced.keys() == {"indices_ptr"}
    assert replaced["indices_ptr"].stride() == (300, 1)
    repeated = torch.zeros(1, 1, 100, dtype=torch.int32).expand(3, 1, 100)
    same = tuning.full_lists(named_args(repeated, None, None))["indices_ptr"]
    assert same.stride() == (0, 1) and same.unique().numel() == 100


@pytest.mark.parametrize("name", tuning.examples())
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", pytest.param("sm_120", marks=pytest.mark.blackwell)])
def test_every_cap_leaves_configs_and_a_bigger_one_more(arch: str, name: str) -> None:
    found = audit(tuning.split_kernel, arch, name, tuning.examples()[name])
    outcomes = [verdict.outcome for verdict in found.verdicts if verdict.outcome != Outcome.PRUNED_BY_USER]
    fits = [verdict for verdict in found.verdicts if verdict.fits]
    assert len(fits) + outcomes.count(Outcome.OVER_SHARED_MEMORY) == len(outcomes), found.rows()
    if arch == "sm_90":
        assert len(fits) == len(outcomes), found.rows()
    if "64 heads" in name:  # heads first needs room for 64 heads' queries
        needs_over_99_kib = [verdict for verdict in found.verdicts if (verdict.need or 0) > 101_376]
        assert len(needs_over_99_kib) == 2
        assert any(verdict.fits for verdict in needs_over_99_kib) == (arch != "sm_120")
    assert sum(verdict.spill_bytes == 0 for verdict in fits) >= 3, found.rows()
    first = next(verdict for verdict in found.verdicts if verdict.outcome != Outcome.PRUNED_BY_USER)
    assert first.fits, "the first config is what first_fit and a cold key fall to"


def test_the_price_of_a_config_is_split_and_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch and combine follow the config's own number of splits."""
    launched: list[tuple[str, Any]] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name, self.arg_names = name, launcher_names

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launched.append((self.name, grid))

    launcher_names = launcher._split_kernel.arg_names
    monkeypatch.setattr(launcher, "_split_kernel", Recorder("split"))
    monkeypatch.setattr(launcher, "_combine_kernel", Recorder("combine"))
    monkeypatch.setattr(launcher, "_sm_count", lambda device: 132)
    call = {
        "q_ptr": torch.zeros(2, 1, 8, 512, dtype=torch.bfloat16), "out_ptr": torch.zeros(2, 1, 8, 512),
        "lse_ptr": None, "sink_ptr": None, "length_ptr": None, "extra_length_ptr": None, "num_heads": 8,
        "topk": 64, "extra_topk": 0, "num_splits": 1, "EARLY": False,
    }  # fmt: skip
    launcher.timed(call, config(32, 8, 4))()
    assert launched == [("split", (2, 1, 2)), ("combine", (2, 8, 1))]
    launched.clear()
    launcher.timed(call, config(64, 8, 4))()
    assert launched == [("split", (2, 1, 1))]


@pytest.mark.parametrize("early", [True, False])
def test_what_is_tuned_is_compiled_as_it_is_launched(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """With the same launch options: else every candidate is compiled a second time, one after the other, when timed."""
    asked: list[dict[str, Any]] = []

    class Tuner:
        def config_for(self, **kwargs: Any) -> triton.Config:
            asked.append(kwargs)
            return tuning.CONFIGS[0]

        def __getitem__(self, grid: Any) -> Any:
            return lambda **kwargs: asked.append(kwargs)

    monkeypatch.setattr(sparse_decode, "split_kernel", Tuner())
    monkeypatch.setattr(sparse_decode, "has_dependent_launch", lambda device: early)
    monkeypatch.setattr(launcher, "_sm_count", lambda device: 132)
    monkeypatch.setattr(launcher, "_combine", lambda *args: None)
    cache = random_cache(4, 64)
    indices, length = torch.zeros(2, 1, 64, dtype=torch.int32), torch.full((2,), 64, dtype=torch.int32)
    q = torch.zeros(2, 1, 8, 512, dtype=torch.bfloat16)
    lists = sparse_decode._lists(cache, indices, length, None, None, None)
    sparse_decode._launch(q, lists, None, 0.1, 8, torch.empty_like(q), None)
    options = [
        {name: kwargs[name] for name in kwargs.keys() - set(launcher._split_kernel.arg_names)} for kwargs in asked
    ]
    assert options == [{"launch_pdl": True} if early else {}] * 2
