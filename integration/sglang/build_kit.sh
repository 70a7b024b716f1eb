#!/usr/bin/env bash
# Packs SGLang and what it needs beside torch, triton and the usual Python packages into one archive: 47 MB for kimi
# (SGLang 0.5.14), 56 MB for minimax (SGLang 0.5.17). Runs without a GPU; needs Python 3.12 with pip, and unzip.
#
#   integration/sglang/build_kit.sh kimi|minimax OUTPUT_FOLDER [SGLANG_KERNEL_WHEEL]
#
# Writes kit-SERVER.tgz and this package's own wheel. PYTHON=python3.12 names another interpreter, WORK=folder keeps
# the downloads for a next time. The wheel of sglang-kernel (615 or 383 MB) is downloaded when none is given.
set -euo pipefail
usage='usage: build_kit.sh kimi|minimax OUTPUT_FOLDER [SGLANG_KERNEL_WHEEL]'
case ${1:-} in
# Newer releases of transformers refuse a config name that SGLang 0.5.14 registers.
kimi) release=(sglang==0.5.14 transformers==5.8.1 apache-tvm-ffi==0.1.9) kernel=sglang-kernel==0.4.4 ;;
minimax) release=(sglang==0.5.17 transformers==5.12.1 apache-tvm-ffi==0.1.11) kernel=sglang-kernel==0.4.5 ;;
*) echo "$usage" >&2 && exit 2 ;;
esac
server=$1
out=${2:?$usage}
kernel_wheel=${3:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3.12}
work=${WORK:+$WORK/$server}
[ -n "$work" ] || { work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT; }
mkdir -p "$out" "$work/wheels" "$work/kernel"
rm -rf "$work/kit"
mkdir -p "$work/kit/site"

platforms=(manylinux2014_x86_64 manylinux1_x86_64)
for minor in 34 31 28 27 24 17; do platforms+=("manylinux_2_${minor}_x86_64"); done
download() { # FOLDER REQUIREMENT...
    local folder=$1
    shift
    "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]/#/--platform=}" -d "$folder" "$@"
}

download "$work/wheels" "${release[@]}" tokenizers==0.22.2 \
    pydantic==2.12.5 pydantic-core==2.41.5 annotated-types==0.8.0 typing-inspection==0.4.5 \
    openai==2.6.1 jiter==0.19.0 distro==1.9.0 sniffio==1.3.1 pyzmq==27.3.0 msgspec==0.23.0 orjson==3.13.0 \
    pybase64==1.5.1 setproctitle==1.3.8 dill==0.4.1 loguru==0.7.3 compressed-tensors==0.20.1 gguf==0.19.0 \
    partial_json_parser==0.2.1.1.post7 fastapi==0.121.3 starlette==0.49.3 uvicorn==0.54.0 \
    python-multipart==0.0.34 watchfiles==1.3.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 \
    referencing==0.37.0 rpds-py==2026.9.1
if [ -z "$kernel_wheel" ]; then
    [ -n "$(find "$work/kernel" -name '*.whl')" ] || download "$work/kernel" "$kernel"
    kernel_wheel=$(find "$work/kernel" -name '*.whl')
fi

site=$work/kit/site
"$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" "$work"/wheels/*.whl
rm -rf "$site/bin"
# Of its compiled parts these flags use the Hopper operators only.
unzip -q -o "$kernel_wheel" 'sgl_kernel/*' 'sglang_kernel-*.dist-info/*' \
    -x sgl_kernel/flash_ops.abi3.so sgl_kernel/flashmla_ops.abi3.so 'sgl_kernel/infllm_ops*' 'sgl_kernel/sm100/*' \
    -d "$site"

# Imported at start and never called with these flags.
mkdir -p "$site/IPython" "$site/flashinfer"
: >"$site/IPython/__init__.py"
: >"$site/soundfile.py"
cat >"$site/IPython/display.py" <<'PYTHON'
def display(*values, **options): ...


class HTML:
    def __init__(self, *values, **options): ...
PYTHON
cat >"$site/flashinfer/__init__.py" <<'PYTHON'
"""A stand-in: its names exist, calling one is an error."""


def missing(name):
    def call(*args, **kwargs):
        raise RuntimeError(f"flashinfer.{name} was called, and this kit has only a stand-in for flashinfer")

    return call


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)
PYTHON
for module in sampling gemm prefill; do
    cat >"$site/flashinfer/$module.py" <<PYTHON
from flashinfer import missing


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return missing("$module." + name)
PYTHON
done

# SGLang 0.5.17 imports it whatever the grammar backend, and names its classes in pydantic models.
if [ "$server" = minimax ]; then
    mkdir -p "$site/xgrammar"
    echo 'from xgrammar import __getattr__' >"$site/xgrammar/structural_tag.py"
    cat >"$site/xgrammar/__init__.py" <<'PYTHON'
"""A stand-in: its names exist, making one is an error."""

import pydantic


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self, *values, **options):
        raise RuntimeError(f"xgrammar.{name} was called, and this kit has only a stand-in for xgrammar")

    return type(name, (pydantic.BaseModel,), {"__init__": refuse})
PYTHON
fi

# pip writes a build folder into the source; the source stays clean.
cp -r "$here/../../"{smart_autotune,patches,pyproject.toml,setup.py,README.md,LICENSE} "$work/kit/"
(cd "$work/kit" && "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work/ours" .)
find "$work/kit" -mindepth 1 -maxdepth 1 ! -name site -exec rm -rf {} +
cp "$work"/ours/smart_autotune-*.whl "$out/"
find "$site" -name __pycache__ -prune -exec rm -rf {} +
tar cf - -C "$work/kit" site | gzip -9 >"$out/kit-$server.tgz"
ls -l "$out"
