"""The Dockerfiles and compose files: linted, resolved, and in agreement with the package."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import tools
from harness.options import load
from harness.paths import ROOT

from deploy.flags import assert_server_options_exist
from deploy.programs import run
from lmcache_client.contract.version import VERSION

DEPLOY = ROOT / "deploy"
DOCKERFILES = (DEPLOY / "docker" / "Dockerfile", DEPLOY / "docker" / "Dockerfile.vllm")
VARIANTS = {"cpu": ["compose.yaml"], "gpu": ["compose.yaml", "compose.gpu.yaml"]}


def resolved(variant: str) -> dict[str, Any]:
    files = [argument for name in VARIANTS[variant] for argument in ("-f", DEPLOY / "compose" / name)]
    found = run(tools.find("docker-compose"), *files, "config", "--format", "json")
    services: dict[str, Any] = json.loads(found)["services"]
    return services


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_clean_pinned_and_ends_as_the_same_user_who_is_not_root(path):
    run(tools.find("hadolint"), "--no-color", "--failure-threshold", "info", path)
    text = path.read_text()
    images = re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.MULTILINE)
    assert images
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "10001:10001"
    assert "install -d -m 0700 -o 10001 -g 10001 /run/lmcache" in text
    # What is copied is there and not ignored.
    ignored, *kept = (ROOT / ".dockerignore").read_text().split()
    assert ignored == "*"
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    packages = {each.parent.name for each in ROOT.glob("lmcache_*/__init__.py")}
    assert names >= packages | {"pyproject.toml", "README.md", "LICENSE"}
    assert not [name for name in names if not (ROOT / name).exists() or f"!{name}" not in kept]


@pytest.mark.parametrize("variant", VARIANTS)
def test_compose_resolves_and_nothing_is_privileged_or_open(variant):
    services = resolved(variant)
    assert set(services) == {"namespace", "lmcache", "vllm", "prometheus", "grafana"}
    for name, service in services.items():
        assert not service.get("privileged")
        assert "ipc" not in service
        assert service.get("pid") in (None, "service:namespace")
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ()))
        if name in ("namespace", "lmcache", "vllm"):
            assert service["user"] == "10001:10001"
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
            assert VERSION in service["image"]
        else:
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert bool(service.get("deploy")) == (variant == "gpu" and name in ("lmcache", "vllm"))
    # Both variants have the same image of the server.
    assert services["lmcache"]["image"] == services["namespace"]["image"] == f"lmcache-mp:{VERSION}"


def test_server_and_engine_of_compose_meet():
    services = resolved("cpu")
    server, engine = services["lmcache"], services["vllm"]
    for name in ("pid", "user"):
        assert server[name] == engine[name]
    for service in (server, engine):
        sockets = [each["target"] for each in service["volumes"] if each["source"] == "socket"]
        assert sockets == ["/run/lmcache"]
    assert server["ulimits"]["memlock"] == -1
    # Bound threads would leave a processor idle for the connector.
    assert engine["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert_server_options_exist((), server["environment"])
    # The server takes what it is given.
    assert load(environment=server["environment"]).http_host == "0.0.0.0"


def test_files_that_compose_mounts_are_there():
    volumes = [each for service in resolved("cpu").values() for each in service.get("volumes", ())]
    found = [Path(each["source"]) for each in volumes if each["type"] == "bind"]
    assert found
    assert not [path for path in found if not path.exists()]
    # Grafana's provider of dashboards reads the directory that the dashboard is mounted in.
    provider = (DEPLOY / "grafana/provisioning/dashboards/lmcache.yml").read_text()
    assert "path: /etc/lmcache" in provider


def test_the_readme_names_every_file_and_its_links_lead_somewhere():
    text = (DEPLOY / "README.md").read_text()
    named = [name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name and (name[0] != "/")]
    existing = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*") if path.is_file()}
    for path in existing - {"README.md"}:
        covered = any(path == name or (name.endswith("/") and path.startswith(name)) for name in named)
        assert covered or path.startswith("grafana/provisioning/"), path
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in target or (DEPLOY / target).exists(), target
