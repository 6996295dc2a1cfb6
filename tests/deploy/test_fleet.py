"""The fleet for Kubernetes and for compose: its parts are valid and fit each other and the programs."""

import json
import os
import re
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
from harness import tools
from harness.namespaces import only_a_loopback
from harness.options import load
from harness.paths import MOONCAKE, ROOT, ROUTERS
from harness.processes import free_port
from harness.routers import needs
from harness.stores import Store, mooncake_places

from deploy import charts
from deploy.charts import Manifest, containers, render
from deploy.flags import assert_server_options_exist, vllm_flags
from deploy.programs import run
from lmcache_client.contract.version import VERSION
from lmcache_server.options.tiers import urls

DEPLOY = ROOT / "deploy"
HOSTS = 3
STORES = {"valkey": "servers.yaml", "mooncake": "mooncake-servers.yaml"}
"""The values of the servers that use a store; the store is in a file of its name."""


def manifests(store: str = "") -> list[Manifest]:
    return charts.load_all((DEPLOY / "fleet" / f"{store or 'fleet'}.yaml").read_text())


def servers(store: str) -> list[Manifest]:
    return render(charts.load(DEPLOY / "fleet" / STORES[store]))


def tier(store: str) -> tuple[urls.TierUrl, Manifest]:
    """The tier of the servers, and their container."""
    (server,) = [each for each in containers(servers(store)) if each["name"] == "lmcache"]
    assert_server_options_exist(server["args"], {each["name"]: "" for each in server["env"]})
    (url,) = [each.removeprefix("--tier=") for each in server["args"] if each.startswith("--tier=")]
    return urls.parse(url), server


def named(kind: str, name: str, store: str = "") -> Manifest:
    (found,) = [each for each in manifests(store) if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod(kind: str, name: str, store: str = "") -> Manifest:
    spec: Manifest = named(kind, name, store)["spec"]["template"]["spec"]
    return spec


def composed(store: str = "valkey", password: str | None = "secret") -> dict[str, Any]:
    files = [argument for name in ("fleet", f"fleet.{store}") for argument in ("-f", f"{name}.yaml")]
    environment = {**os.environ, "VALKEY_PASSWORD": password or ""}
    command = [tools.find("docker-compose"), *files, "config", "--format", "json"]
    services: dict[str, Any] = json.loads(run(*command, cwd=DEPLOY / "compose", env=environment))["services"]
    return services


def test_every_manifest_is_valid() -> None:
    charts.assert_valid(manifests())
    for store in STORES:
        charts.assert_valid([*manifests(store), *servers(store)])


def test_the_servers_use_the_valkey_of_the_fleet() -> None:
    url, server = tier("valkey")
    (password,) = [each for each in server["env"] if each["name"] == "LMCACHE_VALKEY_PASSWORD"]
    store = pod("StatefulSet", "lmcache-valkey", "valkey")["containers"][0]
    assert password["valueFrom"] == store["env"][0]["valueFrom"]
    service = named("Service", "lmcache-valkey", "valkey")["spec"]
    assert url.place == f"lmcache-valkey:{service['ports'][0]['port']}"
    told = "kubectl create secret generic lmcache-valkey --from-literal=password"
    assert told in (DEPLOY / "fleet" / "valkey.yaml").read_text()


def test_the_servers_use_the_mooncake_store_of_the_fleet_and_have_memory_for_their_segment() -> None:
    url, server = tier("mooncake")
    service = named("Service", "lmcache-mooncake", "mooncake")["spec"]
    assert url.place == f"lmcache-mooncake:{service['ports'][0]['port']}"
    (master,) = pod("Deployment", "lmcache-mooncake", "mooncake")["containers"]
    assert master["image"] == server["image"]
    assert master["command"] == ["mooncake_master"]
    assert f"-rpc_port={service['ports'][0]['port']}" in master["args"]
    values = charts.load(DEPLOY / "fleet" / STORES["mooncake"])
    assert values["memoryOverheadGb"] > url.parameters["segment_gb"]


@pytest.mark.parametrize("where", ["kubernetes", "compose"])
def test_mooncakes_master_takes_its_options(where: str, tmp_path: Path) -> None:
    """The real program, with another port, listens where it is told."""
    (container,) = pod("Deployment", "lmcache-mooncake", "mooncake")["containers"]
    arguments = container["args"] if where == "kubernetes" else composed("mooncake")["mooncake"]["command"]
    with only_a_loopback(), unittest.mock.patch.dict(os.environ, mooncake_places()):
        port, other = free_port(), free_port()
        given = [each.replace("50051", str(port)) for each in arguments]
        assert given != arguments
        program = str(MOONCAKE / "mooncake/mooncake_master")
        with Store("mooncake_master", [program, *given, f"-metrics_port={other}"], port, tmp_path):
            pass  # it has been reached at its port


@pytest.mark.parametrize("store", STORES)
def test_policies_and_services_select_the_pods_that_there_are(store: str) -> None:
    all_of_it = (*manifests(), *manifests(store), *servers(store))
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in all_of_it
              if "template" in each.get("spec", {})]  # fmt: skip
    selectors = []
    for each in (*manifests(), *manifests(store)):
        spec = each["spec"]
        if each["kind"] == "Service":
            selectors.append(spec["selector"])
        if each["kind"] == "NetworkPolicy":
            selectors.append(spec["podSelector"]["matchLabels"])
            for rule in spec["ingress"]:
                selectors += [source["podSelector"]["matchLabels"] for source in rule.get("from", ())]
    assert len(selectors) == {"valkey": 7, "mooncake": 9}[store]
    for selector in selectors:
        assert sum(selector.items() <= each.items() for each in labels) == 1, selector


def test_only_servers_reach_the_memory_that_servers_give_to_mooncake() -> None:
    server = {"app.kubernetes.io/name": "lmcache-mp", "app.kubernetes.io/component": "server"}
    policy = named("NetworkPolicy", "lmcache-mooncake-servers", "mooncake")["spec"]
    assert policy["podSelector"]["matchLabels"] == server
    assert policy["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": server}}]}, {"ports": [{"port": "http"}]},
    ]  # fmt: skip
    assert "http" in [each["name"] for each in tier("mooncake")[1]["ports"]]


def test_engines_meet_the_servers_of_the_chart() -> None:
    patch = charts.patch_for_engines(charts.load(DEPLOY / "fleet" / "servers.yaml"))
    charts.assert_patched(pod("StatefulSet", "vllm"), patch)


def vllm_and_router(where: str) -> tuple[list[str], list[str], list[str]]:
    """The arguments of an engine and of the router, and the engines' host names."""
    if where == "compose":
        services = composed()
        names = [name for name in services if name.startswith("vllm")]
        commands = {tuple(services[name]["command"]) for name in names}
        assert len(commands) == 1
        return list(commands.pop()), services["router"]["command"], names
    engine = pod("StatefulSet", "vllm")["containers"][0]
    replicas = named("StatefulSet", "vllm")["spec"]["replicas"]
    names = [f"vllm-{number}.{named('Service', 'vllm')['metadata']['name']}" for number in range(replicas)]
    return engine["args"], pod("Deployment", "router")["containers"][0]["args"], names


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_vllm_and_the_router_take_their_options_and_mean_the_same(where: str) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    needs("vllm_router")
    arguments, router, names = vllm_and_router(where)
    assert len(names) == HOSTS
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments[1:])
    assert parsed.enable_scale_out
    given, _, endpoint = vllm_flags(arguments)
    script = (
        "import dataclasses, json, sys; from vllm_router.launch_router import parse_router_args;"
        "print(json.dumps(dataclasses.asdict(parse_router_args(sys.argv[1:])), default=str))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROUTERS)}
    taken = json.loads(run(sys.executable, "-c", script, *router, env=environment).splitlines()[-1])
    workers = [f"http://{name}:{given['--port']}" for name in names]
    assert taken["worker_urls"] == workers
    assert taken["policy"] == "kv_aware"
    assert taken["kv_event_block_size"] == int(given["--block-size"])
    assert taken["kv_event_model"] == arguments[0]
    for name, worker in zip(names, workers, strict=True):
        assert f"{worker}=tcp://{name}:{endpoint.rpartition(':')[2]}" in taken["kv_event_source"]


@pytest.mark.parametrize("store", STORES)
def test_hosts_of_compose_share_nothing_but_the_store(store: str) -> None:
    services = composed(store)
    assert len(services) == 3 * HOSTS + 2
    for number in range(1, HOSTS + 1):
        server, engine = services[f"lmcache-{number}"], services[f"vllm-{number}"]
        assert server["pid"] == engine["pid"] == f"service:namespace-{number}"
        assert [each["source"] for each in server["volumes"]] == [f"socket-{number}"]
        assert [each["source"] for each in engine["volumes"]] == [f"socket-{number}", "models"]
        assert_server_options_exist((), server["environment"])
        (url,) = load(environment=server["environment"]).of_options["tier"]
        assert urls.parse(url).place == f"{store}:{'6379' if store == 'valkey' else '50051'}"
        assert server["image"] == f"lmcache-mp:{VERSION}-{store}"
        assert server["build"]["args"] == {"EXTRA": store}
        if store == "valkey":
            own = server["environment"]["LMCACHE_VALKEY_PASSWORD"]
            assert own == services["valkey"]["command"][-1] == "secret"
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service["user"].startswith("0")
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ()))
        assert bool(service.get("ports")) == (name == "router")


def test_a_store_without_a_password_is_an_error_that_names_it() -> None:
    with pytest.raises(AssertionError, match=r"VALKEY_PASSWORD is.* missing.*the password of the store"):
        composed(password=None)


def test_the_image_of_the_router_has_the_version_that_is_tested() -> None:
    path = DEPLOY / "docker" / "Dockerfile.router"
    run(tools.find("hadolint"), "--no-color", "--failure-threshold", "info", path)
    (version,) = re.findall(r"vllm-router==([\d.]+)", path.read_text())
    assert f"vllm-router=={version}" in (ROOT / "Makefile").read_text()
    assert pod("Deployment", "router")["containers"][0]["image"].endswith(f"lmcache-mp-router:{version}")
    assert composed()["router"]["image"] == f"lmcache-mp-router:{version}"
    assert "USER 10001:10001" in path.read_text()
