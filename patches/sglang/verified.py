"""The SGLang releases that these patches were verified on, and the files of each that they replace or rely on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from ..gate import Conflict, Gate, check

GATE = Gate(patch="sglang", requirement="sglang>=0.5.13,<0.5.18", home="sglang", fingerprints={})
LEFT_ALONE = "SGLang itself is left as it is; whether its Triton kernels are tuned by us is another patch's matter"
NOTHING_REPLACED = "SGLang's own sparse decode stays"

BACKEND = "srt/layers/attention/deepseek_v4_backend.py"  # calls the decode
MODEL = "srt/models/deepseek_v4.py"  # lays out a rank's heads
DRAFT_MODEL = "srt/models/deepseek_v4_dspark.py"  # does so too


@dataclass(frozen=True)
class Release:
    """One release. ``files``: SHA-256 (first 16 digits) by path below the package.

    ``decode``: the module of the decode's entry. ``heads_lead``: a rank's heads are the first ones of ``q``.
    ``capture``: the method that captures the decode graphs.
    """

    decode: str
    files: Mapping[str, str]
    heads_lead: bool = True
    capture: tuple[str, str] = (
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.capture",
    )


_OLD_PLACE, _NEW_PLACE = "srt/layers/attention/flash_mla_sm120.py", "kernels/ops/attention/flash_mla_sm120.py"
_OLD_NAME, _NEW_NAME = "sglang.srt.layers.attention.flash_mla_sm120", "sglang.kernels.ops.attention.flash_mla_sm120"

# By release; a post-release counts as its release and has to have the very files.
RELEASES = {
    "0.5.13": Release(
        _OLD_NAME,
        {_OLD_PLACE: "0ee89b118179e610", BACKEND: "e183ad636c8f03ec", MODEL: "252d9cfc87701b4f"},
        heads_lead=False,  # with tensor parallelism q holds all heads, and only the rank's slice of them is written
        capture=("sglang.srt.model_executor.cuda_graph_runner", "CudaGraphRunner.capture"),
    ),
    "0.5.14": Release(
        _OLD_NAME,
        {_OLD_PLACE: "0ee89b118179e610", BACKEND: "6bb13531d6610631", MODEL: "6207514516f80f41"},
    ),
    "0.5.15": Release(
        _OLD_NAME,
        {_OLD_PLACE: "5fd2d9d52985caf5", BACKEND: "47af3402cbc4544d", MODEL: "9c87b25c4a233540"},
    ),
    "0.5.16": Release(
        _NEW_NAME,
        {
            _NEW_PLACE: "560837536f54bb7a",
            BACKEND: "57e6a41f005e4f28",
            MODEL: "cbf7f358cb173ca0",
            DRAFT_MODEL: "d9e03e950ed8b75f",
        },
    ),
    "0.5.17": Release(
        _NEW_NAME,
        {
            _NEW_PLACE: "f80df68c252a8c89",
            BACKEND: "a37de7718dbc6f06",
            MODEL: "d13c8434b7ddb6f8",
            DRAFT_MODEL: "36bf0e3a200b6ac3",
        },
    ),
}


def find(version: str | None) -> Release | Conflict:
    """The release that ``version`` is, or why it is none of the verified ones."""
    conflict = check(GATE, version, {})
    if conflict is not None or version is None:
        return replace(conflict or Conflict(GATE.patch, GATE.requirement, "not installed"), consequence=LEFT_ALONE)
    known = RELEASES.get(Version(version).base_version)
    return known or Conflict(GATE.patch, " or ".join(RELEASES), f"sglang {version}", LEFT_ALONE)


def changed_file(release: Release, package: Path) -> Conflict | None:
    """The first file that is not as it was released, or None."""
    for name, expected in release.files.items():
        found = file_hash(package / name)
        if found != expected:
            return Conflict(GATE.patch, f"{name} with SHA-256 {expected}…", found, NOTHING_REPLACED)
    return None


def file_hash(path: Path) -> str:
    """16 hex digits of the SHA-256 of a file, or why it could not be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"that it cannot be read ({error.strerror})"
