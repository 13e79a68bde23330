"""The compiled part of the package; everything else is in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class ParallelBuild(build_ext):
    """Compile the sources of an extension side by side: a form of the kernels takes ten seconds or more."""

    def build_extension(self, ext: Extension) -> None:
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_each
        super().build_extension(ext)


setup(
    cmdclass={"build_ext": ParallelBuild},
    ext_modules=[
        # No Python module: `specdec.kernels.native.library` opens it as a C library. Without a compiler the
        # installation goes on, and the engine runs on plain torch.
        Extension(
            "specdec.kernels.native._library",
            # Forms with wide vectors, which take longest, begin first.
            sources=sorted(glob("kernels/native/*.c"), reverse=True),
            depends=sorted(glob("kernels/native/*.h")),
            # Loops of products that begin anywhere take up to 4 % longer, as other code moves them.
            extra_compile_args=[
                "-O3",
                "-falign-functions=64",
                "-falign-loops=64",
                "-std=gnu11",
                "-ffp-contract=off",
                "-pthread",
                "-g0",
            ],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
    ],
)
