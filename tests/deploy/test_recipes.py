"""The recipes for other projects' charts: engines fit our chart's servers, and vLLM takes their options."""

import pytest
from harness.paths import ROOT

from deploy import charts
from deploy.charts import Manifest, containers, render
from deploy.flags import vllm_flags

RECIPES = ROOT / "deploy" / "recipes"
ENGINES = ("llm-d-engine", "dynamo", "production-stack")


def load(name: str) -> Manifest:
    return charts.load(RECIPES / f"{name}.yaml")


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


def test_every_recipe_is_tested() -> None:
    assert {path.stem for path in RECIPES.iterdir()} == {*ENGINES, "servers", "production-stack-patch"}
    page = (ROOT / "docs" / "several-machines.md").read_text()
    assert all(f"deploy/recipes/{path.name}" in page for path in RECIPES.iterdir())


def test_the_servers_are_one_on_each_node_and_valid() -> None:
    manifests = render(load("servers"))
    assert {each["kind"] for each in manifests} == {"DaemonSet", "Service"}
    charts.assert_valid(manifests)


@pytest.mark.parametrize("name", ENGINES)
def test_the_pods_of_engines_are_valid_fit_the_patch_of_the_chart_and_vllm_takes_their_options(
    name: str,
) -> None:
    template = {"template": {"spec": engine(name)}}
    charts.assert_valid([{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, **template}])
    charts.assert_patched(engine(name), charts.patch_for_engines(load("servers")))
    _, parsed, endpoint = vllm_flags(engine(name)["containers"][0]["args"])
    (server,) = [each for each in containers(render(load("servers"))) if each["name"] == "lmcache"]
    assert f"--port={parsed.port}" in server["args"]
    # The router of production-stack does not listen to KV events.
    assert endpoint.startswith("tcp://*:") == (name != "production-stack")
