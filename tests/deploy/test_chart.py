"""The Helm chart: linted, rendered in every shape, each manifest valid, none with more rights than needed."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import tools
from harness.paths import ROOT
from harness.server import LMCacheServer

from deploy import charts
from deploy.charts import CHART, containers, only, pods, render
from deploy.flags import assert_server_options_exist
from deploy.programs import run
from lmcache_client.connector import settings
from lmcache_client.contract.version import VERSION
from lmcache_server.host import preflight
from lmcache_server.options.tiers import urls

SHAPES = ("default", "gpu", "sidecar", "everything")
each_shape = pytest.mark.parametrize("shape", SHAPES)
SYSTEM = "is a whole disk, or a directory of the system"
MONITORED = {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboard")}


def values(shape: str) -> dict[str, Any]:
    if shape == "default":
        return {}
    if shape == "everything":
        # No value of the file is left out of what is rendered.
        return values("gpu") | {
            "imagePullSecrets": [{"name": "registry"}],
            "user": 1000650000,
            "l1SizeGb": 0.5,
            "l1HostPath": "/dev/shm/lmcache",
            "tier": {"hostPath": "/nvme/lmcache", "sizeGb": 2000},
            "networkPolicy": {"enabled": True, "from": [{"podSelector": {}}]},
            "port": 6000,
            "extraArgs": ["--checksums", "--lease-s=60"],
            "gpu": {"enabled": True, "runtimeClassName": "", "hostIPC": True},
            "affinity": {"nodeAffinity": {}},
            "podAnnotations": {"a": "b"},
            "priorityClassName": "system-node-critical",
            "socket": {"hostPath": "/run/other", "prepare": False},
            "vllm": {"enabled": True, "tokenSecret": "hub", "modelsClaim": "models", "args": ["--seed=1"]},
            **MONITORED,
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "extraVolumes": [{"name": "keys", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "keys", "mountPath": "/keys"}],
        }
    return charts.load(CHART.parent / "values" / f"{shape}.yaml")


@each_shape
def test_the_chart_is_clean_and_every_manifest_is_valid(shape):
    report = tools.module("helm_python.chart").lint(CHART, values(shape), strict=True)
    assert not report["errors"]
    assert {each["error"] for each in report["messages"]} <= {"icon is recommended"}
    custom = {"ServiceMonitor", "PrometheusRule"}
    manifests = render(values(shape))
    kinds = {each["kind"] for each in manifests}
    charts.assert_valid(each for each in manifests if each["kind"] not in custom)
    templates = [each["spec"]["template"] for each in manifests if "template" in each.get("spec", {})]
    services = [each["spec"] for each in manifests if each["kind"] == "Service"]
    assert services
    for service in services:
        selector = service["selector"].items()
        (selected,) = [each for each in templates if selector <= each["metadata"]["labels"].items()]
        ports = {port["name"] for one in selected["spec"]["containers"] for port in one["ports"]}
        assert {port["targetPort"] for port in service["ports"]} <= ports, "the pods have the port"
    if shape != "everything":
        # A plain cluster knows all of it, without the CustomResourceDefinitions of an operator.
        assert {each["apiVersion"] for each in manifests} <= {"v1", "apps/v1"}
        assert "ConfigMap" not in kinds


def test_the_values_for_prometheus_add_its_objects():
    assert charts.load(CHART.parent / "values" / "prometheus.yaml") == MONITORED
    kinds = {each["kind"] for each in render(values("gpu") | MONITORED)}
    assert {"ServiceMonitor", "PrometheusRule", "ConfigMap"} <= kinds


def test_images_come_from_the_registry_that_the_page_names():
    """With the --set of docs/containers.md, no image has a name without a registry."""
    page = (ROOT / "docs" / "containers.md").read_text()
    given = dict(re.findall(r"--set (\S*image\.repository)=(\S+)", page))
    assert set(given) == {"image.repository", "vllm.image.repository"}
    assert set(re.findall(r"docker push (\S+):", page)) == set(given.values())
    for shape in ("gpu", "sidecar"):
        named = values(shape) | {"image": {"repository": given["image.repository"]}}
        named["vllm"]["image"] = {"repository": given["vllm.image.repository"]}
        pulled = {each["image"] for each in containers(render(named))}
        assert pulled <= set(re.findall(r"docker push (\S+)", page))


@each_shape
def test_no_container_has_more_rights_than_it_needs(shape):
    manifests = render(values(shape))
    for pod in pods(manifests):
        assert not pod.get("hostNetwork")
        assert pod["automountServiceAccountToken"] is False
        # What a node's server needs, and no more; see values.yaml.
        assert pod.get("hostPID", False) == (shape != "sidecar")
        assert pod.get("hostIPC", False) == (shape == "everything")
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in containers(manifests):
        assert each["resources"]["requests"]
        assert each["resources"]["limits"]["memory"]
        confined = each["securityContext"]
        assert not confined.get("privileged")
        assert confined["allowPrivilegeEscalation"] is False
        prepares = each["name"] == "directories"
        assert confined["capabilities"] == {"drop": ["ALL"]} | ({"add": ["CHOWN"]} if prepares else {})
        assert confined.get("readOnlyRootFilesystem", False) == (each["name"] != "vllm")
        assert confined.get("runAsUser") == (0 if prepares else None)


def test_the_sidecar_needs_nothing_of_the_node():
    """The level "restricted" of Pod Security: beyond the test above, no volume of the host."""
    for pod in pods(render(values("sidecar"))):
        assert pod["shareProcessNamespace"] is True
        assert all("hostPath" not in volume for volume in pod["volumes"])
        assert len(pod["containers"]) == 2
    assert not any(pod.get("hostIPC") for pod in pods(render({"gpu": {"hostIPC": True}}))), "it takes GPUs"


@each_shape
def test_server_and_engines_meet(shape):
    manifests = render(values(shape))
    found = {each["name"]: each for each in containers(manifests)}
    server = found["lmcache"]
    assert_server_options_exist(server["args"], {each["name"]: each.get("value") for each in server["env"]})
    named = {pod["securityContext"]["runAsUser"] for pod in pods(manifests)}
    assert len(named) == 1
    if "vllm" not in found:
        return
    directory, *others = (
        {each["name"]: each.get("value") for each in container["env"]}["LMCACHE_RUNTIME_DIR"]
        for container in (server, found["vllm"])
    )
    assert others == [directory]
    sources = {
        json.dumps({**volume.get("hostPath", {}), "type": ""})
        for pod in pods(manifests)
        for volume in pod["volumes"]
        if volume["name"] == "socket"
    }
    assert len(sources) == 1
    transfer = next(each for each in found["vllm"]["args"] if each.startswith("--kv-transfer-config="))
    parsed, _ = settings.parse(json.loads(transfer.partition("=")[2])["kv_connector_extra_config"])
    assert f"--port={parsed.port}" in server["args"]


def the_server(given: dict[str, Any]) -> charts.Manifest:
    (server,) = [each for each in containers(render(given)) if each["name"] == "lmcache"]
    return server


@pytest.mark.parametrize(("size_gb", "limit_mib"), [(10.5, 12_854), (1000, 1_031_168)])
def test_memory_covers_l1_and_what_grows_with_it(size_gb, limit_mib):
    server = the_server({"l1SizeGb": size_gb, "gpu": {"enabled": size_gb == 1000}})
    assert server["image"] == f"lmcache-mp:{VERSION}", "one image, also for GPUs"
    assert f"--l1-size-gb={size_gb}" in server["args"]
    assert server["resources"]["limits"]["memory"] == f"{limit_mib}Mi"
    assert server["resources"]["requests"] == server["resources"]["limits"] | {"cpu": "1"}
    # And so the server, which has used some 100 MiB by then, accepts the limit.
    available_bytes = (limit_mib - 100) << 20
    assert preflight.memory(int(size_gb * 2**30), 0, available_bytes, "the limit").verdict == preflight.OK


@pytest.mark.parametrize(
    ("given", "directory", "flag"),
    [
        (
            {"tier": {"hostPath": "/nvme/lmcache", "sizeGb": 1.5}},
            "/nvme/lmcache",
            "--tier=dir:///var/lib/lmcache/tier?size_gb=1.5",
        ),
        ({"l1HostPath": "/dev/shm/x"}, "/dev/shm/x", "--l1-path=/var/lib/lmcache/l1/lmcache.l1"),
    ],
    ids=["tier", "l1"],
)
def test_a_directory_of_the_node_is_made_for_the_user_and_given_to_the_server(given, directory, flag):
    manifests = render(given)
    pod = only(manifests, "DaemonSet")["spec"]["template"]["spec"]
    (server,), (init,) = pod["containers"], pod["initContainers"]
    assert flag in server["args"]
    (volume,) = [each for each in pod["volumes"] if each.get("hostPath", {}).get("path") == directory]
    assert volume["hostPath"]["type"] == "DirectoryOrCreate"
    (mount,) = [each for each in server["volumeMounts"] if each["name"] == volume["name"]]
    assert mount in init["volumeMounts"]
    assert f"{mount['mountPath']}/" in f"{flag}/".replace("?", "/")
    assert mount["mountPath"] in init["command"][-1].splitlines()[0]
    if "tier" in given:
        (url,) = [each.partition("=")[2] for each in server["args"] if each.startswith("--tier=")]
        parsed = urls.parse(url)
        assert (parsed.place, parsed.parameters["size_gb"]) == (mount["mountPath"], 1.5)
    # Nothing of it without the value.
    assert flag not in the_server({})["args"]
    assert len(the_server({})["volumeMounts"]) == 2


def test_vllm_on_cpus_has_as_many_threads_as_its_pod_has_processors():
    (engine,) = [each for each in containers(render(values("sidecar"))) if each["name"] == "vllm"]
    given = {each["name"]: each.get("value") for each in engine["env"]}
    assert given["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert given["OMP_NUM_THREADS"] == engine["resources"]["requests"]["cpu"]


@pytest.mark.parametrize("shape", ["default", "sidecar"])
def test_a_network_policy_lets_only_the_named_peers_reach_http(shape):
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    engines = [{"ports": [{"port": "openai"}]}] if shape == "sidecar" else []
    for peers in ([], [peer]):
        manifests = render(values(shape) | {"networkPolicy": {"enabled": True, "from": peers}})
        policy = only(manifests, "NetworkPolicy")
        charts.assert_valid([policy])
        # A rule with an empty `from` would let everybody in.
        http = [{"from": peers, "ports": [{"port": "http"}]}] if peers else []
        assert policy["spec"].get("ingress", []) == http + engines
        wanted = policy["spec"]["podSelector"]["matchLabels"].items()
        templates = [each["spec"]["template"] for each in manifests if "template" in each.get("spec", {})]
        assert [wanted <= each["metadata"]["labels"].items() for each in templates] == [True]
    assert "NetworkPolicy" not in {each["kind"] for each in render(values(shape))}


def test_the_patch_for_engines_gives_them_what_the_charts_own_engine_has():
    patch = charts.patch_for_engines({"socket": {"hostPath": "/run/other"}})
    (own,) = [each for each in pods(render(values("everything"))) if each["containers"][0]["name"] == "vllm"]
    assert (patch["hostPID"], patch["enableServiceLinks"]) == (own["hostPID"], own["enableServiceLinks"])
    assert set(patch["securityContext"]) <= set(own["securityContext"])
    (container,), (engine, *_) = patch["containers"], own["containers"]
    assert all(each in engine["env"] for each in container["env"])
    (volume,), (mount,) = patch["volumes"], container["volumeMounts"]
    assert mount["mountPath"] in {each["mountPath"] for each in engine["volumeMounts"]}
    assert volume["hostPath"] in [each.get("hostPath") for each in own["volumes"]]
    assert volume["name"] == mount["name"]
    # An engine must start on a node without a server, too.
    assert volume["hostPath"]["type"] == "DirectoryOrCreate"


def test_the_service_monitor_finds_the_metrics_under_the_name_of_the_alerts():
    manifests = render(MONITORED)
    monitor = only(manifests, "ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    services = [each for each in manifests if each["kind"] == "Service"]
    (selected,) = [each for each in services if wanted <= each["metadata"]["labels"].items()]
    (endpoint,) = monitor["endpoints"]
    assert (endpoint["port"], endpoint["honorLabels"]) == ("http", True), "alerts leave out our `namespace`"
    job = selected["metadata"]["labels"][monitor["jobLabel"]]
    assert f'up{{job="{job}"}}' in (CHART / "files" / "rules.yml").read_text()


def test_engines_of_the_chart_are_scraped_under_a_name_that_is_not_the_servers():
    """LMCacheEngineWithoutServer needs their metrics; LMCacheServerDown must not be about them."""
    manifests = render(values("gpu") | MONITORED)
    own, engines = (each["spec"] for each in manifests if each["kind"] == "ServiceMonitor")
    services = [each for each in manifests if each["kind"] == "Service"]
    selected = [
        [
            each
            for each in services
            if monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
        ]
        for monitor in (own, engines)
    ]
    assert [len(each) for each in selected] == [1, 1]
    ports = {each["name"]: each["port"] for each in selected[1][0]["spec"]["ports"]}
    assert ports[engines["endpoints"][0]["port"]] == 8000
    assert "jobLabel" not in engines


def test_a_server_that_is_not_ready_does_not_keep_requests_from_the_engine_beside_it():
    for shape in ("sidecar", "gpu"):
        servers = [each for each in containers(render(values(shape))) if each["name"] == "lmcache"]
        assert ["readinessProbe" in each for each in servers] == [shape == "gpu"]


def test_alerts_and_dashboard_are_the_files_of_the_repository():
    """The chart has copies and no links: helm says two lines about them at each call."""
    for copied in ("prometheus/rules.yml", "grafana/dashboard.json"):
        copy = CHART / "files" / Path(copied).name
        assert not copy.is_symlink()
        assert copy.read_bytes() == (ROOT / "deploy" / copied).read_bytes(), f"cp deploy/{copied} {copy}"
    manifests = render(MONITORED)
    assert only(manifests, "PrometheusRule")["spec"] == charts.load(CHART / "files" / "rules.yml")
    board = only(manifests, "ConfigMap")["data"]["lmcache.json"]
    assert json.loads(board) == json.loads((CHART / "files" / "dashboard.json").read_text())


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"l1SizeGB": 4}, "l1SizeGB"),
        ({"l1SizeGb": "4"}, "l1SizeGb"),
        ({"user": 0}, "user"),
        ({"mode": "pod"}, "mode"),
        ({"gpu": {"hostPID": True}}, "hostPID"),
        ({"mode": "sidecar"}, "set vllm.enabled to true"),
        ({"mode": "sidecar", "vllm": {"enabled": True}, "l1HostPath": "/dev/shm/x"}, "set mode to node"),
        ({"tier": {"hostPath": "nvme", "sizeGb": 1}}, "hostPath"),
        ({"tier": {"hostPath": "/nvme"}}, "sizeGb"),
        ({"tier": {"hostPath": "/nvme/x", "sizeGB": 1}}, "sizeGB"),
        ({"tier": {"hostPath": "/nvme", "sizeGb": 1}}, f"tier.hostPath /nvme {SYSTEM}"),
        ({"l1HostPath": "/dev/shm/"}, f"l1HostPath /dev/shm/ {SYSTEM}"),
        ({"socket": {"hostPath": "/run"}}, f"socket.hostPath /run {SYSTEM}"),
        ({"socket": {"hostPath": "/var/run/"}}, f"socket.hostPath /var/run/ {SYSTEM}"),
        ({"l1HostPath": "/dev/shm/."}, "l1HostPath"),
        ({"l1HostPath": "/dev//shm"}, "l1HostPath"),
        ({"l1HostPath": "/dev/shm/x/.."}, "l1HostPath"),
        ({"l1HostPath": "/dev/shm/it's"}, "l1HostPath"),
        ({"extraArgs": ["--port=7777"]}, "extraArgs has --port, which the chart sets"),
        ({"socket": {"hostPath": "/var/run/x"}, "l1HostPath": "/run/x"}, "are one directory"),
        ({"extraArgs": ["--host", "0.0.0.0"]}, "--host without --key-file"),
        ({"extraArgs": ["--host=0.0.0.0", "--key-file="]}, "--host without --key-file"),
        ({"extraArgs": ["--host=localhost.example.com"]}, "--host without --key-file"),
        ({"extraEnv": [{"name": "LMCACHE_HOST", "value": "0.0.0.0"}]}, "set --host and --key-file"),
        ({"tier": {"hostPath": "/run/lmcache-mp", "sizeGb": 1}}, "are one directory"),
        ({"tier": {"sizeGb": 20}}, "set tier.hostPath"),
        ({"http": {"host": "127.0.0.1"}}, "http.host"),
        (
            {"vllm": {"enabled": True}, "extraArgs": ["--host", "::1"]},
            "no socket for the engines of this chart",
        ),
    ],
)
def test_values_that_cannot_work_are_refused_with_their_name(given, complaint):
    with pytest.raises(Exception, match=re.escape(complaint)):
        render(given)


def test_a_host_is_taken_with_a_key_or_on_the_loopback():
    for given in (["--host=0.0.0.0", "--key-file=/keys/k"], ["--host", "127.0.0.1"]):
        assert the_server({"extraArgs": given})["args"][-2:] == given


def test_an_address_of_ipv6_stays_text():
    assert "--http-host=::" in the_server({"http": {"host": "::"}})["args"]


def test_a_long_release_name_gives_names_that_services_may_have():
    manifests = render(values("gpu"), "r" * 53)
    names = [each["metadata"]["name"] for each in manifests if each["kind"] == "Service"]
    assert len(names) > 1
    assert all(len(name) <= 63 for name in names)


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_value_is_in_the_schema_and_used_and_the_chart_is_of_this_version():
    about = charts.load(CHART / "Chart.yaml")
    assert about["appVersion"] == about["version"] == VERSION
    loaded = charts.load(CHART / "values.yaml")
    schema = json.loads((CHART / "values.schema.json").read_text())
    templates = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
    for leaf in leaves(loaded):
        known = schema
        for name in leaf.split("."):
            assert "properties" not in known or name in known["properties"], leaf
            known = known.get("properties", {}).get(name, {})
        used = [".".join(leaf.split(".")[:depth]) for depth in range(1, leaf.count(".") + 2)]
        assert any(re.search(rf"\.Values\.{re.escape(each)}\b(?!\.)", templates) for each in used), leaf


def test_the_init_container_gives_the_directory_to_the_user(tmp_path):
    """Its very script, as root with CHOWN alone: on directories as the kubelet makes them, again, and when
    they were opened to others since."""
    if os.getuid() != 0:
        pytest.skip("gives a directory to another user, which takes root")
    tier = {"hostPath": "/nvme/lmcache", "sizeGb": 1}
    found = {each["name"]: each for each in containers(render({"tier": tier}))}
    shell, options, script = found["directories"]["command"]
    directories = []
    for number, mount in enumerate(each["mountPath"] for each in found["directories"]["volumeMounts"]):
        directories.append(tmp_path / str(number))
        directories[-1].mkdir()
        assert mount in script
        script = script.replace(mount, str(directories[-1]))
    assert len(directories) == 2
    setpriv = [tools.find("setpriv"), "--bounding-set=-all,+chown", "--inh-caps=-all"]
    # The first directory is in order already when the second is not.
    for mode in (0o755, 0o700, 0o777, 0o755):
        directories[-1].chmod(mode)
        if mode == 0o777:
            directories[0].chmod(mode)
        run(*setpriv, shell, options, script)
        for each in directories:
            info = each.stat()
            assert (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (10001, 10001, 0o700)
    # What holds files of others is left alone.
    os.chown(directories[-1], 0, 0)
    directories[-1].chmod(0o755)
    (directories[-1] / "of others").touch()
    done = subprocess.run([*setpriv, shell, options, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "/nvme/lmcache of the node is in use: name a directory that holds nothing else\n"
    # So is what is everybody's, such as /var/tmp, even while it is empty.
    (directories[-1] / "of others").unlink()
    directories[-1].chmod(0o1777)
    done = subprocess.run([*setpriv, shell, options, script], capture_output=True, text=True, check=False)
    assert "is in use" in done.stderr
    assert done.returncode == 1
    assert directories[-1].stat().st_uid == 0


def test_in_a_sidecar_the_server_makes_the_directory_inside_a_volume_that_all_may_enter(
    tmp_path, monkeypatch
):
    """As an emptyDir is, with the group's bit of fsGroup; the directory itself is for nobody else."""
    volume = Path(tmp_path) / "volume"
    volume.mkdir()
    volume.chmod(0o2777)
    server = LMCacheServer(l1_size_gb=0.01)
    server.environment["LMCACHE_RUNTIME_DIR"] = str(volume / "socket")
    with server:
        assert (volume / "socket").stat().st_mode & 0o777 == 0o700
        assert server.cli("ping").returncode == 0
