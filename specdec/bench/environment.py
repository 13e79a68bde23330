"""Circumstances that belong to every measured figure: machine, versions and commit."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.models import hub

PACKAGE = Path(specdec.__file__).parent
# Results of one benchmark are no change for the next one.
CODE = ("--", ":/", ":(exclude,top)benchmarks/results")
CPUINFO = Path("/proc/cpuinfo")


def environment(*packages: str) -> dict[str, Any]:
    """Return hardware, versions, threads, and the commit if this is a checkout.

    Args:
        packages: further packages whose versions are named, if they are installed.
    """
    tracked = _git("ls-files", "__init__.py") == "__init__.py"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "specdec": specdec.__version__,
        "torch": torch.__version__,
        **{name: found for name in ("transformers", *packages) if (found := _version(name))},
        "commit": _git("rev-parse", "--short", "HEAD") if tracked else None,
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no", *CODE)) if tracked else None,
    }


def shown_path(path: str | Path) -> str:
    """Return a path as results name it: without this machine's folders where it is built in or from the hub."""
    inside = Path(path)
    return str(inside.relative_to(PACKAGE.parent)) if inside.is_relative_to(PACKAGE) else hub.shown_path(inside)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    if CPUINFO.is_file():
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git(*words: str) -> str:
    """Return the answer of git in the package's folder; nothing without git or outside a repository."""
    if shutil.which("git") is None:
        return ""
    answer = subprocess.run(["git", *words], cwd=PACKAGE, capture_output=True, text=True, check=False)
    return answer.stdout.strip()
