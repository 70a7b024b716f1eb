"""Whether a patch may be applied here: a pure comparison whose answer is a value, never an exception.

A patch was verified for one release and for the very source of each function it replaces or relies on. Anything else
(another version, edited source, somebody else's patch, an unsupported platform) is a :class:`Conflict`.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

PLATFORMS = ("linux",)


@dataclass(frozen=True)
class Conflict:
    """Why a patch is refused: what was expected, what was found, and what happens now."""

    patch: str
    expected: str
    found: str
    consequence: str = "stock behaviour is left as it is"

    def __str__(self) -> str:
        return f"{self.patch}: expected {self.expected}, found {self.found}; {self.consequence}"


@dataclass(frozen=True)
class Found:
    """One function as it is in this process: the module that defined it and the hash of its source."""

    module: str
    fingerprint: str


@dataclass(frozen=True)
class Gate:
    """What one patch declares. ``fingerprints``: by dotted name, of every function it replaces or relies on."""

    patch: str
    requirement: str
    home: str  # the module whose own functions these are; anything else is a foreign patch
    fingerprints: Mapping[str, str]


def check(gate: Gate, version: str | None, found: Mapping[str, Found], platform: str = sys.platform) -> Conflict | None:
    """The first conflict between what ``gate`` declares and what is here, or None."""
    if not platform.startswith(PLATFORMS):
        return Conflict(gate.patch, f"platform {' or '.join(PLATFORMS)}", platform)
    return _version_conflict(gate, version) or _source_conflict(gate, found)


def _version_conflict(gate: Gate, version: str | None) -> Conflict | None:
    if version is None:
        return Conflict(gate.patch, gate.requirement, "not installed")
    try:
        requirement, installed = Requirement(gate.requirement), Version(version)
    except (InvalidRequirement, InvalidVersion) as error:
        return Conflict(gate.patch, gate.requirement, f"version {version!r} ({error})")
    if not requirement.specifier.contains(installed, prereleases=True):
        return Conflict(gate.patch, gate.requirement, f"{requirement.name} {version}")
    return None


def _source_conflict(gate: Gate, found: Mapping[str, Found]) -> Conflict | None:
    for name, fingerprint in gate.fingerprints.items():
        here = found.get(name)
        if here is None:
            return Conflict(gate.patch, f"a function {name}", "none of that name")
        if here.module != gate.home:
            return Conflict(gate.patch, f"{name} of {gate.home}", f"one put there by {here.module}")
        if here.fingerprint != fingerprint:
            return Conflict(gate.patch, f"{name} with source {fingerprint}", f"source {here.fingerprint}")
    return None


def look_at(function: Any) -> Found | None:
    """A function's module (where its code runs, whatever it claims) and the fingerprint of its source."""
    if function is None:
        return None
    if type(function) is not FunctionType:  # a proxy passes itself off as what it wraps, but not to ``type``
        return Found(f"{type(function).__module__}.{type(function).__qualname__}", "not a function")
    return Found(str(function.__globals__.get("__name__")), fingerprint(function))


def fingerprint(function: FunctionType) -> str:
    """16 hex digits of the SHA-256 of a function's source, without comment lines, blank lines and indentation."""
    try:
        source = textwrap.dedent(inspect.getsource(function.__code__))
    except (OSError, TypeError):
        return "unreadable"
    lines = [line.rstrip() for line in source.splitlines()]
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
