"""`docker/replicas.yaml` on a cluster of one machine: a rolling restart.

Not a part of CI: starting Ray and its replicas takes minutes.
"""

import asyncio
import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

import pytest
import yaml
from openai import AsyncOpenAI

from specdec import LLM
from tests.specdec.ray_serve.streams import RECOVERY, run, stream, texts

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'specdec[ray]'")

FILE = Path(__file__).parents[3] / "docker" / "replicas.yaml"
PROMPTS = [f"I need a train to {place}" for place in ("the north", "the south", "the east", "the west", "Cambridge")]


class Cluster(NamedTuple):
    """A cluster of this machine, with the application of the file.

    Attributes:
        port: of Ray Serve's HTTP proxy.
        client: of Ray Serve's controller, as `serve run` and `serve deploy` use it.
    """

    port: int
    client: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, **arguments: Any) -> None:
        """Deploy the file's application with other `args`, as `serve deploy` does."""
        from ray.serve.schema import ServeDeploySchema

        content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
        content["applications"][0]["args"] |= arguments
        self.client.deploy_apps(ServeDeploySchema(**content))

    def replicas(self, deployment: str) -> set[str]:
        """Return the names of a deployment's replicas, those that start or end as well."""
        named = ray.util.list_named_actors(all_namespaces=True)
        return {each["name"] for each in named if f"#{deployment}#" in each["name"]}

    def running(self, deployment: str) -> int:
        """Return how many replicas of a deployment take requests."""
        from ray import serve

        status = serve.status().applications["specdec"].deployments.get(deployment)
        return 0 if status is None else status.replica_states.get("RUNNING", 0)

    def models(self) -> list[str]:
        """Return the names of the served models, none while nothing answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=RECOVERY) as reply:
                return [each["id"] for each in json.load(reply)["data"]]
        except (HTTPError, ConnectionError):
            return []


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + RECOVERY
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from ray import serve
    from ray.serve._private.api import serve_start

    # Room for old and new replicas at a time; the machine may have fewer cores.
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        found = Cluster(port, serve_start(http_options={"host": "127.0.0.1", "port": port}))
        found.deploy()
        wait_for(lambda: bool(found.running("front") and found.running("engine") and found.models()))
        yield found
        serve.shutdown()
    finally:
        ray.shutdown()


async def until(client: AsyncOpenAI, prompts: list[str], max_tokens: int, what: Callable[[], None]) -> list[list[str]]:
    """Return each client's answers: it streams one after another until something is done, and ends the last."""
    done = asyncio.Event()

    async def answers(prompt: str) -> list[str]:
        found = [await stream(client, prompt, max_tokens, model="demo")]
        while not done.is_set():
            found.append(await stream(client, prompt, max_tokens, model="demo"))
        return found

    clients = [asyncio.create_task(answers(prompt)) for prompt in prompts]
    try:
        await asyncio.to_thread(what)
    finally:
        done.set()
    return await asyncio.gather(*clients)


def test_no_stream_is_lost_in_a_rolling_restart(cluster: Cluster, offline: LLM) -> None:
    """Front end and engine are replaced, each after the end of its requests."""
    before = {name: cluster.replicas(name) for name in ("front", "engine")}

    def restart() -> None:
        time.sleep(1)
        cluster.deploy(settings={"max_num_seqs": 32}, server={"served_model_name": ["demo", "another"]})
        wait_for(lambda: not any(cluster.replicas(name) & before[name] for name in before))
        wait_for(lambda: cluster.models() == ["demo", "another"])

    found = run(cluster, lambda client: until(client, PROMPTS, 200, restart))
    for answers, text in zip(found, texts(offline, PROMPTS, 200), strict=True):
        # The first was begun before the restart, and the last at its end.
        assert len(answers) > 1
        assert set(answers) == {text}
