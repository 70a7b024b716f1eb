"""A package that has the places of SGLang that our patches wrap, and nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from smart_autotune import batch
from smart_autotune.patches import sglang as plugin
from smart_autotune.patches import switch
from smart_autotune.patches.sglang import verified

ENTRY_MODULE = "sglang.srt.layers.attention.flash_mla_sm120"
BACKEND_MODULE = "sglang.srt.layers.attention.deepseek_v4_backend"
RUNNER_MODULE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
FILES = {
    "srt/layers/attention/flash_mla_sm120.py": """
def flash_mla_with_kvcache_sm120(**kwargs):
    return "theirs", kwargs
""",
    "srt/layers/attention/deepseek_v4_backend.py": """
_is_sm120 = True

class DeepseekV4AttnBackend:
    def forward(self, q, k, v, layer, forward_batch=None, **call):
        from sglang.srt.layers.attention.flash_mla_sm120 import flash_mla_with_kvcache_sm120
        return flash_mla_with_kvcache_sm120(q=q, **call)[0]
""",
    "srt/models/deepseek_v4.py": "",
    "srt/model_executor/runner/decode_cuda_graph_runner.py": """
class DecodeCudaGraphRunner:
    def __init__(self, sizes, model_runner, width=1):
        self.capture_bs, self.model_runner, self.captured_req_width, self.captured = sizes, model_runner, width, []

    def capture(self):
        self.captured = list(reversed(self.capture_bs))
""",
    "srt/managers/scheduler.py": """
from types import SimpleNamespace

class Scheduler:
    def __init__(self, tp_rank=0, **server_args):
        self.ps = SimpleNamespace(tp_rank=tp_rank, pp_rank=0, dp_rank=None)
        self.server_args = SimpleNamespace(enable_metrics=False, **server_args)

    def get_init_info(self):
        return {"status": "ready"}
""",
}


def write(folder: Path, version: str = "0.5.14") -> Path:
    """The package below ``folder``."""
    package = folder / "sglang"
    for name, text in {"__init__.py": f'__version__ = "{version}"\n', **FILES}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for directory in {path.parent for path in package.rglob("*.py")}:
        while directory != package:
            (directory / "__init__.py").touch()
            directory = directory.parent
    return package


@contextmanager
def loaded(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str = "0.5.14") -> Iterator[ModuleType]:
    """The fake is imported as ``sglang`` and counts as the release that its version names."""
    package = write(folder, version)
    files = {name: verified.file_hash(package / name) for name in FILES if "layers" in name or "models" in name}
    release = verified.RELEASES["0.5.14"]
    with monkeypatch.context() as scope:
        scope.syspath_prepend(str(folder))
        scope.setitem(verified.RELEASES, "0.5.14", verified.Release(release.decode, files))
        scope.setattr(plugin, "_warm_up", ())
        scope.setattr(plugin, "_decode", None)
        scope.setattr(plugin, "_refused", [])
        scope.setattr(switch, "_servers", {})
        scope.setattr(switch, "_put_back", set())
        importlib.invalidate_caches()
        try:
            yield importlib.import_module("sglang")
        finally:
            plugin.revert()
            batch.end_buckets_at(())
            for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
                del sys.modules[name]
