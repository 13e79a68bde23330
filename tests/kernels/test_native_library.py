"""Which file of the compiled library is opened."""

import ctypes
import sysconfig
from pathlib import Path

import pytest
import torch

from specdec.kernels.native import library as native_library
from specdec.kernels.native.library import STRUCTURES, Library, library_file

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


needs_library = pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
STALE = "was built from other sources; build it anew: python setup.py build_ext"


class _Longer(ctypes.Structure):
    _fields_ = [("more", ctypes.c_int64), *STRUCTURES[3]._fields_]


@needs_library
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VERSION", 1),
        ("STRUCTURES", STRUCTURES[:-1]),
        ("STRUCTURES", (*STRUCTURES, STRUCTURES[0])),
        ("STRUCTURES", (*STRUCTURES[:3], _Longer, *STRUCTURES[4:])),
    ],
    ids=["a version", "a structure less", "a structure more", "a field more"],
)
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    Library(1, torch.float32)
    monkeypatch.setattr(native_library, name, value)
    with pytest.raises(ValueError, match=STALE):
        Library(1, torch.float32)


def test_a_file_that_is_no_library_is_refused(folder: Path) -> None:
    """As one is that was built for another processor."""
    build(folder, OWN)
    message = rf"^{folder / OWN} cannot be opened, file too short; build it anew: [^\n]*$"
    with pytest.raises(ValueError, match=message):
        Library(1, torch.float32)


def test_a_library_without_an_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were built before it had one."""
    monkeypatch.setenv("SPECDEC_NATIVE_LIBRARY", torch._C.__file__)
    with pytest.raises(ValueError, match=STALE):
        Library(1, torch.float32)
