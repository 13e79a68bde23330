"""Types for users: mypy on a script in another folder, after the README's installation."""

import importlib.util
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPT = """
from specdec import LLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputsParams, TokensPrompt

llm = LLM(
    model="a",
    tensor_parallel_size=1,
    trust_remote_code=False,
    seed=0,
    max_model_len=64,
    speculative_config={"method": "ngram", "num_speculative_tokens": 3},
)
params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
params.max_tokens = 5
prompt: TokensPrompt = {"prompt_token_ids": [1, 2]}
outputs: list[RequestOutput] = llm.generate([{"prompt": "b"}, {"prompt": "c"}], params, use_tqdm=False)
outputs += llm.generate([prompt, prompt]) + llm.generate("a") + llm.generate(["a", "b"]) + llm.generate([[3], [4]])
reveal_type(outputs[0].outputs[0].token_ids)
reveal_type(llm.chat([{"role": "user", "content": "a"}], [params])[0].num_cached_tokens)
reveal_type(llm.beam_search("a", BeamSearchParams(2, 3))[0].sequences[0].text)
llm.generate(5.5)
SamplingParams(max_token=3)
LLM(tensor_parallel=1)
"""
FOUND = """
script.py:16: note: Revealed type is "list[int]"
script.py:17: note: Revealed type is "int | None"
script.py:18: note: Revealed type is "str | None"
script.py:19: error: Argument 1 to "generate" of "LLM" has incompatible type "float"
script.py:20: error: Unexpected keyword argument "max_token" for "SamplingParams"
script.py:21: error: Unexpected keyword argument "tensor_parallel" for "LLM"
"""
# Their types take mypy half a minute to read.
SETTINGS = """
[mypy]
strict = true
[mypy-torch.*,transformers.*,tokenizers.*,rich.*,numpy.*,jinja2.*,llguidance.*,msgspec.*,zmq.*,safetensors.*,triton.*]
follow_imports = skip
ignore_missing_imports = true
"""


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy, of the extra dev")
def test_mypy_checks_a_users_script(tmp_path: Path) -> None:
    """In an environment that holds what `pip install -e .` writes for this layout: a path, and no import hook."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        sources = tomllib.load(file)["tool"]["setuptools"]["package-dir"][""]
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "__editable__.specdec.pth").write_text(str(ROOT / sources))
    (tmp_path / "script.py").write_text(SCRIPT.lstrip())
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    python = tmp_path / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin"})
    wanted = FOUND.split("\n")[1:-1]
    lines = [line for line in done.stdout.splitlines() if line.startswith("script.py") and ': note: "' not in line]
    assert len(lines) == len(wanted), done.stdout + done.stderr
    for line, want in zip(lines, wanted, strict=True):
        assert line.startswith(want)
