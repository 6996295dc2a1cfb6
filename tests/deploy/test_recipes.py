"""The recipes for other projects' charts: engines fit our chart's servers, and vLLM takes their options."""

import json

import pytest
from harness import tools
from harness.paths import ROOT

from deploy.test_chart import CHART, KUBERNETES, Manifest, containers, render
from lmcache_client.connector import settings

RECIPES = ROOT / "deploy" / "recipes"
ENGINES = ("llm-d-engine", "dynamo", "production-stack")


def load(name: str) -> Manifest:
    loaded: Manifest = tools.module("yaml").safe_load((RECIPES / f"{name}.yaml").read_text())
    return loaded


def engine(name: str) -> Manifest:
    """The pod of the engines of a recipe, as Kubernetes gets it from what the recipe sets."""
    recipe = load(name)
    if name == "llm-d-engine":
        return recipe["spec"]["template"]["spec"]
    if name == "dynamo":
        (worker,) = [each for each in recipe["spec"]["components"] if each["type"] == "worker"]
        return worker["podTemplate"]["spec"]
    # What production-stack's template makes of its values, and the patch.
    (model,) = recipe["servingEngineSpec"]["modelSpec"]
    container = {
        "name": "vllm",
        "image": f"{model['repository']}:{model['tag']}",
        "args": model["vllmConfig"]["extraArgs"],
        "env": model["env"],
        "volumeMounts": model["extraVolumeMounts"],
    }
    own = {"containers": [container], "volumes": model["extraVolumes"]}
    security = {"securityContext": recipe["servingEngineSpec"]["securityContext"]}
    return own | security | load("production-stack-patch")["spec"]["template"]["spec"]


def options(name: str) -> dict[str, str]:
    given = [each for each in engine(name)["containers"][0]["args"] if each.startswith("--")]
    return {option: value for option, _, value in (each.partition("=") for each in given)}


def test_every_recipe_is_tested() -> None:
    assert {path.stem for path in RECIPES.iterdir()} == {*ENGINES, "servers", "production-stack-patch"}
    page = (ROOT / "docs" / "routing.md").read_text()
    assert all(f"deploy/recipes/{path.name}" in page for path in RECIPES.iterdir())


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_servers_are_one_on_each_node_and_valid(version: str) -> None:
    manifests = render(load("servers"))
    assert {each["kind"] for each in manifests} == {"DaemonSet", "Service"}
    for each in manifests:
        tools.module("kubernetes_validate").validate(each, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", ENGINES)
def test_the_pods_of_engines_are_valid(name: str, version: str) -> None:
    template = {"template": {"spec": engine(name)}}
    manifest = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "engine"}, **template}
    tools.module("kubernetes_validate").validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", ENGINES)
def test_engines_have_what_the_patch_of_the_chart_gives(name: str) -> None:
    with tools.module("helm_python.chart").Chart.load(CHART) as chart:
        files = chart.render(load("servers"), name="cache", namespace="ai")
    notes = next(text for file, text in files.items() if file.endswith("NOTES.txt"))
    text = "apiVersion:" + notes.partition("apiVersion:")[2].partition("\n\n")[0]
    patch = tools.module("yaml").safe_load(text)["spec"]["template"]["spec"]
    pod = engine(name)
    (wanted,), container = patch.pop("containers"), pod["containers"][0]
    assert patch.pop("volumes") == pod["volumes"]
    assert wanted["volumeMounts"] == container["volumeMounts"]
    assert all(each in container["env"] for each in wanted["env"])
    assert patch.items() <= pod.items()


@pytest.mark.parametrize("name", ENGINES)
def test_vllm_takes_the_options(name: str) -> None:
    from vllm.config import KVTransferConfig
    from vllm.config.kv_events import KVEventsConfig

    given = options(name)
    transfer = KVTransferConfig(**json.loads(given["--kv-transfer-config"]))
    assert (transfer.kv_connector, transfer.kv_role) == ("LMCacheMPConnector", "kv_both")
    parsed, ignored = settings.parse(transfer.kv_connector_extra_config)
    (server,) = [each for each in containers(render(load("servers"))) if each["name"] == "lmcache"]
    assert not ignored
    assert f"--port={parsed.port}" in server["args"]
    if name == "production-stack":
        assert "--kv-events-config" not in given, "its router does not listen to them"
        return
    events = KVEventsConfig(**json.loads(given["--kv-events-config"]))
    assert events.enable_kv_cache_events
    assert events.publisher == "zmq"
    assert events.endpoint.startswith("tcp://*:")
