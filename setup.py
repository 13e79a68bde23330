"""The compiled part of the package; everything else is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        # No Python module: `specdec.kernels.native_library` opens it as a C library. Without a compiler the
        # installation goes on, and the engine runs on plain torch.
        Extension(
            "specdec.kernels.native._library",
            sources=sorted(glob("kernels/native/*.c")),
            depends=sorted(glob("kernels/native/*.h")),
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off", "-pthread", "-g0"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
    ]
)
