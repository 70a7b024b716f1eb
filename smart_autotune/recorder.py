"""``SMART_AUTOTUNE_LOG``: one line of JSON for each key whose config is settled, and all that compiling it again takes.

A line is written when a key is tuned, read from disk, taken from another rank, served cold (once) or found to have no
config that fits (once); never by a launch that has a plan. Writing asks no GPU, so it is safe inside a capture. No
argument's data is written: types, constants, divisibility and compile options are. The line of a tuning is also kept
beside its entry on disk, whether there is a log or not.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import triton

from smart_autotune import limits, log_file, replay, settings
from smart_autotune.checks import innermost
from smart_autotune.errors import one_line
from smart_autotune.identity import canonical
from smart_autotune.key import KeyReader, TuningKey
from smart_autotune.launch import Call
from smart_autotune.once import warn_once
from smart_autotune.replay import Binder, NotReplayable
from smart_autotune.verdict import TAKEN_OVER, Outcome, TuningRecord, Verdict

if TYPE_CHECKING:
    from smart_autotune.batch import BatchRule
    from smart_autotune.serving import Ranking
    from smart_autotune.view import AutotunerView

log = logging.getLogger("smart_autotune")

FORMAT = 1
MOST_MET = 1024  # calls that wait for their key to be settled
MOST_FAILED = 4096
PRUNED = "dropped by the kernel's own prune"
_VERDICT_FIELDS = (
    "need", "limit", "unit", "detail", "registers", "spill_bytes", "median_us", "spread_us", "compile_secs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Met:
    """One call as it compiles, kept until its key is settled. ``recipes``: by a config's values; or why there is none.

    ``place``: where the kernel's source is.
    """

    call: weakref.ref[Call]
    place: Mapping[str, Any]
    recipes: Mapping[str, Mapping[str, Any] | str]


_mutex = threading.Lock()
_met: OrderedDict[TuningKey, Met] = OrderedDict()
_failed: set[TuningKey] = set()


def forget() -> None:
    """As a new process (tests)."""
    with _mutex:
        _met.clear()
        _failed.clear()


# ---- what the tuner tells --------------------------------------------------------------------------------------------


def met(view: AutotunerView, batch: BatchRule, call: Call, configs: Sequence[triton.Config]) -> None:
    """A call whose key is about to be settled among ``configs``. Keeps how it compiles, none of its tensors."""
    if not settings.current().log:
        return
    try:
        keys = [name for name in view.keys if name in view.arg_names]
        reader = KeyReader(view.kernel_name, view.arg_names, keys, batch.part, view.heuristics_below())
        key = _without_device(reader.read(call.named, view.source_identity, limits.UNKNOWN))
        with _mutex:
            before = _met.get(key)
        if before and before.call() is call and all(_text(config) in before.recipes for config in configs):
            return  # on the way to one tuning a call is met several times
        found = Met(weakref.ref(call), _place(view), _recipes(call, configs))
    except Exception as error:
        _not_recorded(view.kernel_name, error)
        return
    with _mutex:
        _met[key] = found
        _met.move_to_end(key)
        while len(_met) > MOST_MET:
            _met.popitem(last=False)


def settled(record: TuningRecord) -> None:
    """A key has its ranking: tuned here, read from disk or taken from another rank."""
    if not settings.current().log:
        return
    event = "ranking" if record.served_by in TAKEN_OVER else "tuning"
    _record(event, record.kernel, record.key, _fates(record.verdicts), _about(record))


def line_of(view: AutotunerView, call: Call, record: TuningRecord) -> str | None:
    """The line of a key that was tuned on ``call`` just now, to be kept beside its entry. None: a fault of ours."""
    try:
        with _mutex:
            found = _met.get(_without_device(record.key))
        if found is None:  # there is no log for which it was worked out before
            offered = [v.config for v in record.verdicts if v.outcome is not Outcome.PRUNED_BY_USER]
            found = Met(weakref.ref(call), _place(view), _recipes(call, offered))
        return _line("tuning", record.kernel, record.key, _fates(record.verdicts), _about(record), found)
    except Exception as error:
        _not_recorded(record.kernel, error, "beside its entry in the cache folder")
        return None


def served_cold(kernel: str, key: TuningKey, ranking: Ranking, reason: str) -> None:
    """A key is served without having been tuned: by ``ranking``, best first."""
    if not settings.current().log:
        return
    about = {"served_by": ranking.origin, "notes": [reason]}
    _record("cold", kernel, key, [(config, {}) for config in ranking.configs], about)


def nothing_fits(kernel: str, key: TuningKey, verdicts: Iterable[Verdict]) -> None:
    """No config can run for ``key``; said once, however often it is tried."""
    if not settings.current().log:
        return
    with _mutex:
        if key in _failed or len(_failed) >= MOST_FAILED:
            return
        _failed.add(key)
    _record("nothing fits", kernel, key, _fates(verdicts), {"served_by": "", "notes": []})


# ---- the line --------------------------------------------------------------------------------------------------------


def _without_device(key: TuningKey) -> TuningKey:
    return key._replace(device=())


def _place(view: AutotunerView) -> dict[str, Any]:
    function = view.autotuner.base_fn
    return {
        "module": function.__module__,
        "qualname": function.__qualname__,
        "file": function.__code__.co_filename,
        "line": function.__code__.co_firstlineno,
        "source": str(getattr(innermost(view.fn), "cache_key", ""))[:16],
        "arguments": list(getattr(innermost(view.fn), "arg_names", ())),
    }


class _Recorder:
    """Stands in for the jitted function below a tuner: says how a call would compile instead of compiling it."""

    def __init__(self, jit: Any) -> None:
        self._binder = Binder(jit, triton.runtime.driver.active.get_current_target())
        self._arg_names = jit.arg_names

    def run(self, *args: Any, grid: Any = None, warmup: bool = True, **kwargs: Any) -> dict[str, Any]:
        return replay.encode(self._binder.recipe(args, kwargs), self._arg_names)


def _recipes(call: Call, configs: Sequence[triton.Config]) -> dict[str, Mapping[str, Any] | str]:
    """One for each config. A config whose call has none (its heuristics raise, a value without a text) says why."""
    try:
        fn = replay.with_jit_replaced(call.fn, _Recorder)
    except NotReplayable as error:
        return {_text(config): str(error) for config in configs}
    twin = dataclasses.replace(call, fn=fn)
    found: dict[str, Mapping[str, Any] | str] = {}
    for config in configs:
        try:
            recipe = twin.compile(config)
        except Exception as error:
            recipe = str(error) if isinstance(error, NotReplayable) else one_line(error)
        found[_text(config)] = recipe
        found.setdefault(_text_of_any_stages(config), recipe)
    return found


def _text(config: triton.Config) -> str:
    return canonical(_encoded_config(config))


def _text_of_any_stages(config: triton.Config) -> str:
    return canonical({**_encoded_config(config), "num_stages": None})


def _encoded_config(config: triton.Config) -> dict[str, Any]:
    values = {}
    for name, value in config.kwargs.items():
        try:
            values[name] = replay.plain(value)
        except NotReplayable as error:
            values[name] = {"unknown": str(error)}
    options = {name: value for name, value in config.all_kwargs().items() if name not in config.kwargs}
    return {"kwargs": values, **options}


def _record(
    event: str, kernel: str, key: TuningKey, configs: Sequence[tuple[triton.Config, Mapping[str, Any]]],
    about: Mapping[str, Any],
) -> None:  # fmt: skip
    with _mutex:
        found = _met.pop(_without_device(key), None)
    try:
        text = _line(event, kernel, key, configs, about, found)
    except Exception as error:
        _not_recorded(kernel, error)
        return
    log_file.append(settings.current().log, text)


def _line(
    event: str, kernel: str, key: TuningKey, configs: Sequence[tuple[triton.Config, Mapping[str, Any]]],
    about: Mapping[str, Any], found: Met | None,
) -> str:  # fmt: skip
    module, _, qualname = key.kernel.partition("@")[0].rpartition(".")
    place = found.place if found else {"module": module, "qualname": qualname}
    line = {
        "format": FORMAT, "event": event, "time": round(time.time(), 3), "pid": os.getpid(),
        "triton": str(triton.__version__), "kernel": kernel, **place, "key": _key(key), "bucket": key.bucket,
        **about, **_configs(configs, found.recipes if found else {}),
    }  # fmt: skip
    return json.dumps(line, allow_nan=False)


def _about(record: TuningRecord) -> dict[str, Any]:
    return {
        "served_by": record.served_by, "batch": record.batch, "notes": list(record.notes),
        "compile_secs": round(record.compile_secs, 6), "timing_secs": round(record.timing_secs, 6),
    }  # fmt: skip


def _configs(
    configs: Sequence[tuple[triton.Config, Mapping[str, Any]]], recipes: Mapping[str, Mapping[str, Any] | str]
) -> dict[str, Any]:
    """``call``: what all recipes have in common; each of ``configs``: its values, its fate, its ``own`` rest."""
    found = [
        PRUNED if fields.get("outcome") == Outcome.PRUNED_BY_USER else _recipe_of(config, recipes)
        for config, fields in configs
    ]
    known = [recipe for recipe in found if not isinstance(recipe, str)]
    shared = replay.common(known) if known else None
    listed = []
    for (config, fields), recipe in zip(configs, found):
        rest = {"unknown": recipe} if isinstance(recipe, str) else {"own": replay.without(recipe, shared or {})}
        listed.append({"config": _encoded_config(config), **fields, **rest})
    return {"call": shared, "configs": listed}


def _recipe_of(config: triton.Config, recipes: Mapping[str, Mapping[str, Any] | str]) -> Mapping[str, Any] | str:
    """The config's recipe. A rescued config has that of an offered one, with fewer stages."""
    recipe = recipes.get(_text(config))
    if recipe is None:
        rescued_from = recipes.get(_text_of_any_stages(config))
        if rescued_from is None:
            return "the call was not seen"
        recipe = rescued_from
    if isinstance(recipe, str):
        return recipe
    return {**recipe, "options": {**recipe["options"], "num_stages": config.num_stages}}


def _fates(verdicts: Iterable[Verdict]) -> list[tuple[triton.Config, Mapping[str, Any]]]:
    return [(verdict.config, _fields(verdict)) for verdict in verdicts]


def _fields(verdict: Verdict) -> dict[str, Any]:
    fields = {name: _finite(getattr(verdict, name)) for name in _VERDICT_FIELDS}
    return {"outcome": str(verdict.outcome), **{name: v for name, v in fields.items() if v not in (None, "")}}


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _key(key: TuningKey) -> dict[str, Any]:
    return {
        "text": key.describe(),
        "device": dict(key.device),
        "values": {name: [kind, _plain_or_type(value)] for name, kind, value in key.values},
        "dtypes": dict(key.dtypes),
        "batch": None if key.batch is None else list(key.batch),
    }


def _plain_or_type(value: Any) -> Any:
    try:
        return replay.plain(value)
    except NotReplayable as error:
        return {"unknown": str(error)}


# ---- trouble ---------------------------------------------------------------------------------------------------------


def _not_recorded(kernel: str, error: Exception, where: str = "in SMART_AUTOTUNE_LOG") -> None:
    """A fault of ours costs the line, never the launch."""
    if settings.current().strict:
        raise error
    warn_once((where, kernel), "%s: a tuning is not %s: %s", kernel, where, one_line(error))
