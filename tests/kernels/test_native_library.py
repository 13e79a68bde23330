"""Which file of the compiled library is opened."""

import sysconfig
from pathlib import Path

import pytest

from specdec.kernels.native import library as native_library
from specdec.kernels.native.library import library_file

OWN = f"_library{sysconfig.get_config_var('EXT_SUFFIX')}"
# They sort before and behind the own one, by version, implementation, platform and build.
OTHERS = [
    "_library.cpython-27-x86_64-linux-gnu.so",
    "_library.cpython-310d-x86_64-linux-gnu.so",
    "_library.cpython-399-x86_64-linux-gnu.so",
    "_library.cpython-399t-x86_64-linux-gnu.so",
    "_library.pypy399-pp73-x86_64-linux-gnu.so",
    f"{OWN.removesuffix('.so')}-other.so",
    "_library.0.so",
    "_library_old.so",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which the library is looked for."""
    monkeypatch.delenv("SPECDEC_NATIVE_LIBRARY", raising=False)
    monkeypatch.setattr(native_library, "__file__", str(tmp_path / "library.py"))
    return tmp_path


def build(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize("other", OTHERS)
def test_the_library_is_that_of_this_python(folder: Path, other: str) -> None:
    build(folder, other, OWN)
    assert library_file() == folder / OWN


def test_those_of_other_pythons_are_none(folder: Path) -> None:
    build(folder, *OTHERS)
    (folder / OWN).mkdir()
    assert library_file() is None


def test_the_most_specific_name_comes_first(folder: Path) -> None:
    """Names without a version are every Python's."""
    names = ["_library.so", "_library.abi3.so", OWN]
    for name in names:
        build(folder, name)
        assert library_file() == folder / name


def test_the_environment_names_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder, OWN)
    monkeypatch.setenv("SPECDEC_NATIVE_LIBRARY", str(folder / "_library.sanitized.so"))
    assert library_file() == folder / "_library.sanitized.so"
