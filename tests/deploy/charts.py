"""The Helm chart, rendered, and the manifests of others, read and validated."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import tools
from harness.paths import ROOT

CHART = ROOT / "deploy" / "helm" / "lmcache-mp"
KUBERNETES = ("1.29", "1.34")
Manifest = dict[str, Any]


def load_all(text: str) -> list[Manifest]:
    return [each for each in tools.module("yaml").safe_load_all(text) if each]


def load(path: Path) -> Manifest:
    (manifest,) = load_all(path.read_text())
    return manifest


def rendered(given: Manifest, release: str = "cache") -> dict[str, str]:
    with tools.module("helm_python.chart").Chart.load(CHART) as chart:
        files: dict[str, str] = chart.render(given, name=release, namespace="ai")
    return files


def render(given: Manifest, release: str = "cache") -> list[Manifest]:
    files = rendered(given, release)
    return [each for name, text in files.items() if name.endswith(".yaml") for each in load_all(text)]


def patch_for_engines(given: Manifest) -> Manifest:
    """What the notes of the chart tell users to add to the pods of their engines."""
    (notes,) = [text for name, text in rendered(given).items() if name.endswith("NOTES.txt")]
    (patch,) = load_all("apiVersion:" + notes.partition("apiVersion:")[2].partition("\n\n")[0])
    spec: Manifest = patch["spec"]["template"]["spec"]
    return spec


def assert_valid(manifests: Iterable[Manifest]) -> None:
    for manifest in manifests:
        for version in KUBERNETES:
            tools.module("kubernetes_validate").validate(manifest, version, strict=True)


def assert_patched(pod: Manifest, patch: Manifest) -> None:
    """The pod of an engine has all that the patch adds."""
    rest = {name: value for name, value in patch.items() if name not in ("containers", "volumes")}
    (wanted,), container = patch["containers"], pod["containers"][0]
    assert all(each in pod["volumes"] for each in patch["volumes"])
    for name in ("volumeMounts", "env"):
        assert all(each in container[name] for each in wanted[name])
    assert rest.items() <= pod.items()


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    for each in manifests:
        if each["kind"] in ("DaemonSet", "Deployment"):
            yield each["spec"]["template"]["spec"]


def containers(manifests: list[Manifest]) -> list[Manifest]:
    return [each for pod in pods(manifests) for each in (*pod["containers"], *pod.get("initContainers", ()))]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = [each for each in manifests if each["kind"] == kind]
    return found
