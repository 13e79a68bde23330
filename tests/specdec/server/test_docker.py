"""Files for Docker, Prometheus and Grafana. Images cannot be built in a test: that files parse and name what exists."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.specdec.server.running import Served

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
METRIC = re.compile(r"(?:vllm|specdec):\w+")


def test_every_metric_of_the_dashboard_exists(server: Served) -> None:
    dashboard = json.loads((DOCKER / "grafana/specdec.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    named = {name for expression in expressions for name in METRIC.findall(expression)}
    # A finished request gives every metric but that of accepted tokens by depth a value.
    assert server.send("POST", "/v1/completions", {"prompt": "a", "max_tokens": 20})[0] == 200
    families = [*text_string_to_metric_families(server.send("GET", "/metrics")[2].decode())]
    counters = {f"{family.name}_total" for family in families if family.type == "counter"}
    assert named - counters - {sample.name for family in families for sample in family.samples} == set()
    for expression in expressions:
        assert METRIC.search(expression)
        assert expression.count("(") == expression.count(")")
        labels = {name for labels in re.findall(r"by \(([^)]*)\)", expression) for name in labels.split(", ")}
        assert labels <= {"le", "finished_reason", "position"}
    panels = [panel["gridPos"] for panel in dashboard["panels"]]
    assert len({(place["x"], place["y"]) for place in panels}) == len(panels)


def test_the_services_of_compose_find_their_files() -> None:
    services = _yaml("compose.yaml")["services"]
    build = services["specdec"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    mounts = [volume.split(":") for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    assert all((DOCKER / source).is_file() for source, _, _ in mounts)
    (job,) = _yaml("prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["specdec:8000"]}]
    (source,) = _yaml("grafana/datasource.yaml")["datasources"]
    dashboard = json.loads((DOCKER / "grafana/specdec.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    (provider,) = _yaml("grafana/provider.yaml")["providers"]
    assert any(target.startswith(provider["options"]["path"]) for _, target, _ in mounts)


def _yaml(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_dockerfiles_are_sound(name: str) -> None:
    text = re.sub(r"^#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    words = {line.split()[0] for line in text.splitlines() if line}
    assert words <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
    (extras,) = re.findall(r"pip install .*'\.\[(.*)\]'", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (version,) = set(re.findall(r"FROM python:(\d\.\d+)-slim", text))
    assert f"Python :: {version}" in " ".join(project["classifiers"])
    (entry,) = re.findall(r"ENTRYPOINT (.*)", text)
    assert json.loads(entry)[:2] == ["specdec", "serve"]
