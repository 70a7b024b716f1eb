"""What ``pyproject.toml`` cannot say: where ``patches/`` goes, and the ``.pth`` beside the packages."""

import pathlib
import shutil

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PATCHES = "smart_autotune.patches"
STARTUP = "patches/site/smart_autotune.pth"  # one line; Python runs it at start, from the top of site-packages


class BuildPy(build_py):
    """Also puts the ``.pth`` into a wheel. Not into an editable install: there ``smart-autotune run`` reaches."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = pathlib.Path(self.build_lib) / pathlib.Path(STARTUP).name
            shutil.copyfile(STARTUP, target)

    def get_source_files(self):
        return [*super().get_source_files(), STARTUP]  # so that a source distribution has it

    def get_outputs(self, include_bytecode=True):
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, f"{self.build_lib}/{pathlib.Path(STARTUP).name}"]


setup(
    cmdclass={"build_py": BuildPy},
    package_dir={PATCHES: "patches"},
    packages=[
        *find_packages(include=["smart_autotune", "smart_autotune.*"]),
        PATCHES,
        f"{PATCHES}.sglang",
    ],
)
