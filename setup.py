"""The package list: `smart_autotune` as it lies, and `patches/` as `smart_autotune.patches`."""

from setuptools import find_packages, setup

PATCHES = "smart_autotune.patches"

setup(
    package_dir={PATCHES: "patches"},
    packages=[
        *find_packages(include=["smart_autotune", "smart_autotune.*"]),
        PATCHES,
        *(f"{PATCHES}.{name}" for name in find_packages("patches")),
    ],
)
