"""The Kubernetes manifests: valid by its schemas, and in agreement with flags, routes, files and
drain. None of them was run in a cluster here."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
import pytest
import yaml

from actorium.actors.config import sources
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.http.routes import ROUTES, Access
from actorium.actors.runtime.security import curve_keys, endpoints, private_paths
from actorium.tools.cli.cluster_nodes import (
    ClusterFile,
    JoinOptions,
    UpOptions,
    make_keys,
    read_cluster_file,
    serve_words,
)
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.serve_command import ServeOptions

FOLDER = Path(__file__).parents[2] / "tools/deploy"
ENGINE, CLUSTER, KUBERAY = "kubernetes", "kubernetes-cluster", "kuberay"
FILES: dict[str, list[dict[str, Any]]] = {
    name: list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    for name in (ENGINE, CLUSTER, KUBERAY)}
DOCUMENTS = [(name, document) for name, found in FILES.items() for document in found]
NEWEST = kubernetes_validate.latest_version()
CRDS = os.environ.get("KUBERAY_CRDS", "")
"""Folder of KubeRay's ray.io_*.yaml (helm-chart/kuberay-operator/crds of its repository)."""

TEMPLATE: dict[str, Any] = {"template": {"metadata": {"labels": dict}, "spec": dict},
                            "rayStartParams": dict}
RAY_JOB: dict[str, Any] = {
    "apiVersion": str, "kind": str, "metadata": {"name": str}, "spec": {
        "entrypoint": str, "shutdownAfterJobFinishes": bool, "backoffLimit": int,
        "rayClusterSpec": {
            "rayVersion": str, "headGroupSpec": TEMPLATE,
            "workerGroupSpecs": [TEMPLATE | {"groupName": str, "replicas": int,
                                             "minReplicas": int, "maxReplicas": int}]}}}
"""The fields of KubeRay's RayJob (ray.io/v1) that are used here, as its definition has them."""


class ManifestPod(NamedTuple):
    """A pod that some document makes."""

    file: str
    name: str
    spec: dict[str, Any]


def of(file: str, kind: str, name: str = "") -> dict[str, Any]:
    return next(each for each in FILES[file] if each["kind"] == kind
                and name in ("", each["metadata"]["name"]))


def pods() -> list[ManifestPod]:
    found = [ManifestPod(file, each["metadata"]["name"], each["spec"]["template"]["spec"])
             for file, each in DOCUMENTS if each["kind"] in ("Deployment", "StatefulSet")]
    ray = of(KUBERAY, "RayJob")["spec"]["rayClusterSpec"]
    groups = [ray["headGroupSpec"], *ray["workerGroupSpecs"]]
    return found + [ManifestPod(KUBERAY, f"ray-{i}", group["template"]["spec"])
                    for i, group in enumerate(groups)]


PODS = pods()
OWN = [pod for pod in PODS if pod.file != KUBERAY]
SERVING = [pod for pod in OWN if "--key" not in pod.spec["containers"][0]["args"]]
every_pod = pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)
own_pod = pytest.mark.parametrize("pod", OWN, ids=lambda pod: pod.name)
serving_pod = pytest.mark.parametrize("pod", SERVING, ids=lambda pod: pod.name)


def cluster_file(file: str, tmp_path: Path) -> ClusterFile:
    """cluster.toml of the file's ConfigMap, as `cluster up` reads it."""
    path = tmp_path / "cluster.toml"
    path.write_text(of(file, "ConfigMap")["data"]["cluster.toml"])
    return read_cluster_file(path)


def config_of(pod: ManifestPod, tmp_path: Path) -> Config:
    """What a pod that serves is told, by its arguments or its file."""
    words = pod.spec["containers"][0]["args"]
    if words[0] == "serve":
        return parse("actorium serve", words[1:], ServeOptions).config
    assert words[:2] == ["cluster", "up"] and len(words) == 3
    found = cluster_file(pod.file, tmp_path)
    return parse("actorium serve", serve_words(found, Path(found.keys)), ServeOptions).config


# --- schemas -------------------------------------------------------------------------------------

@pytest.mark.parametrize("document", [each for _, each in DOCUMENTS if each["kind"] != "RayJob"],
                         ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_the_schema_accepts_it_and_would_refuse_a_misspelt_field(document: dict) -> None:
    kubernetes_validate.validate(document, NEWEST, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**document, "spce": {}}, NEWEST, strict=True)


@every_pod
def test_the_schema_of_pods_accepts_those_of_ray_too(pod: ManifestPod) -> None:
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod.spec}
    kubernetes_validate.validate(whole, NEWEST, strict=True)


def unknown(found: Any, known: Any, where: str = "") -> list[str]:
    """What is not as `known` has it."""
    if isinstance(known, type):
        return [] if type(found) is known else [f"{where}: {found!r}"]
    if isinstance(known, list):
        return [fault for i, each in enumerate(found)
                for fault in unknown(each, known[0], f"{where}.{i}")]
    return [fault for name, each in found.items() for fault in
            (unknown(each, known[name], f"{where}.{name}") if name in known
             else [f"{where}.{name}"])]


def test_ray_job_has_fields_of_kuberays_alone() -> None:
    job = of(KUBERAY, "RayJob")
    assert job["apiVersion"] == "ray.io/v1" and unknown(job, RAY_JOB) == []
    assert unknown({**job, "spec": {"entrypiont": ""}}, RAY_JOB) == [".spec.entrypiont"]
    assert unknown({"kind": 1}, RAY_JOB) == [".kind: 1"]


def its_own_definition_accepts_it() -> None:
    definition = yaml.safe_load((Path(CRDS) / "ray.io_rayjobs.yaml").read_text())
    schema = next(each["schema"]["openAPIV3Schema"] for each in definition["spec"]["versions"]
                  if each["name"] == "v1")

    def close(part: Any) -> None:
        """Unknown fields are refused, as `kubectl apply` does."""
        if isinstance(part, dict):
            if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
                part.setdefault("additionalProperties", False)
            for each in part.values():
                close(each)
        elif isinstance(part, list):
            for each in part:
                close(each)

    close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    job = of(KUBERAY, "RayJob")
    jsonschema.validate(job, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "spec": {**job["spec"], "entrypiont": ""}}, schema)


if CRDS:  # a file of another project, for who has it: no test is skipped for it
    test_kuberays_own_definition = its_own_definition_accepts_it


# --- flags, routes, drain ------------------------------------------------------------------------

@serving_pod
def test_probes_ask_open_routes_at_a_port_that_is_opened(pod: ManifestPod, tmp_path: Path) -> None:
    container, gateway = pod.spec["containers"][0], config_of(pod, tmp_path).gateway
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    known = {path for one in ROUTES if one.access is Access.OPEN for path in one.paths}
    assert gateway.host == "0.0.0.0"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in known and ports[asked["port"]] == gateway.port


@serving_pod
def test_there_is_time_to_drain_and_to_start(pod: ManifestPod, tmp_path: Path) -> None:
    runtime, container = config_of(pod, tmp_path).runtime, pod.spec["containers"][0]
    sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod.spec["terminationGracePeriodSeconds"] > sleep + runtime.drain_timeout
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= runtime.start_timeout


@every_pod
def test_variables_are_read_and_secrets_come_from_secrets(pod: ManifestPod) -> None:
    fields = {f"ACTORIUM_{field.name.upper()}": field for field in sources.fields().values()}
    for each in pod.spec["containers"][0].get("env", []):
        if each["name"].startswith("ACTORIUM_"):
            assert fields[each["name"]].name == "api_key" and "secretKeyRef" in each["valueFrom"]


@every_pod
def test_what_is_mounted_is_there(pod: ManifestPod) -> None:
    volumes = {each["name"] for each in pod.spec["volumes"]}
    containers = [*pod.spec["containers"], *pod.spec.get("initContainers", ())]
    mounted = {each["name"] for one in containers for each in one["volumeMounts"]}
    assert mounted == volumes
    maps = {each["configMap"]["name"] for each in pod.spec["volumes"] if "configMap" in each}
    assert maps <= {of(pod.file, "ConfigMap")["metadata"]["name"]} if maps else True


@pytest.mark.parametrize("service", [(file, each) for file, each in DOCUMENTS
                                     if each["kind"] == "Service" and "ports" in each["spec"]],
                         ids=lambda one: f"{one[0]}-{one[1]['metadata']['name']}")
def test_services_lead_to_ports_of_pods(service: tuple[str, dict[str, Any]]) -> None:
    file, document = service
    labels: list[tuple[dict[str, str], dict[str, Any]]] = []
    for each in FILES[file]:
        if each["kind"] in ("Deployment", "StatefulSet"):
            template = each["spec"]["template"]
            labels.append((template["metadata"]["labels"], template["spec"]))
        elif each["kind"] == "RayJob":
            template = each["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
            labels.append((template["metadata"]["labels"], template["spec"]))
    spec, = (spec for found, spec in labels if document["spec"]["selector"].items()
             <= found.items())
    names = {port["name"] for port in spec["containers"][0]["ports"]}
    assert {port["targetPort"] for port in document["spec"]["ports"]} <= names


# --- several machines ----------------------------------------------------------------------------

def test_nodes_join_the_head_by_names_that_it_knows(tmp_path: Path) -> None:
    file, nodes = cluster_file(CLUSTER, tmp_path), of(CLUSTER, "StatefulSet")
    name = nodes["metadata"]["name"]
    assert [*file.nodes] == [f"{name}-{i}" for i in range(nodes["spec"]["replicas"])]
    container = nodes["spec"]["template"]["spec"]["containers"][0]
    words = container["args"]
    assert words[:2] == ["cluster", "join"]
    parsed = parse("actorium cluster join", words[3:], JoinOptions, model=False)
    assert parsed.options.node == "$(POD_NAME)" and "POD_NAME" in {
        each["name"] for each in container["env"]}
    assert parsed.config.runtime.name == file.name
    head, listens = endpoints.parse(words[2]), endpoints.parse(file.listen)
    service = of(CLUSTER, "Service", "actorium-head")["spec"]
    assert head.host == "actorium-head" and head.port == service["ports"][0]["port"]
    assert service["publishNotReadyAddresses"], "the head is ready when a node has joined"
    serving = next(pod for pod in PODS if pod.name == "actorium-head").spec["containers"][0]
    ports = {one["name"]: one["containerPort"] for one in serving["ports"]}
    assert ports[service["ports"][0]["targetPort"]] == listens.port
    assert of(CLUSTER, "Service", nodes["spec"]["serviceName"])["spec"]["clusterIP"] == "None"


def test_the_job_of_ray_is_a_head_that_has_room_there(tmp_path: Path) -> None:
    job = of(KUBERAY, "RayJob")["spec"]
    name, *words = shlex.split(job["entrypoint"])
    assert name == "actorium" and words[:2] == ["cluster", "up"]
    options = parse("actorium cluster up", words[3:], UpOptions, model=False).options
    path = tmp_path / Path(words[2]).name
    path.write_text(of(KUBERAY, "ConfigMap")["data"][path.name])
    file = read_cluster_file(path, options.ray, options.ray_address)
    config = parse("actorium serve", serve_words(file, Path(file.keys)), ServeOptions).config
    group, = job["rayClusterSpec"]["workerGroupSpecs"]
    assert file.ray is not None and file.ray.address == "auto"
    assert (file.ray.replicas, file.ray.most) == (group["minReplicas"], group["maxReplicas"])
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert file.ray.cpus == float(limits["cpu"])
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    container, = head["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports["http"] == config.gateway.port and config.gateway.host == "0.0.0.0"
    assert ports["nodes"] == endpoints.parse(file.listen).port
    assert "readinessProbe" not in container, "the job begins when the pod is ready"
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]
            }["config"] == str(Path(words[2]).parent)
    assert head["terminationGracePeriodSeconds"] > config.runtime.drain_timeout


def test_a_file_in_the_manifest_is_the_one_that_is_named() -> None:
    head = of(CLUSTER, "Deployment")["spec"]["template"]["spec"]
    path = Path(head["containers"][0]["args"][2])
    assert {mount["name"]: mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]
            }["config"] == str(path.parent)
    assert path.name in of(CLUSTER, "ConfigMap")["data"]


# --- folders and keys ----------------------------------------------------------------------------

def prepared(pod: ManifestPod, tmp_path: Path, secrets: dict[str, bytes]) -> Path:
    """What the init container makes of volumes as a kubelet sets them up: an emptyDir that all may
    write to, and a Secret's files as links, readable by a group."""
    for name in ("scratch", "private"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o2777)
    if secrets:
        data = tmp_path / "secret" / "..data"
        data.mkdir(parents=True)
        for name, content in secrets.items():
            (data / name).write_bytes(content)
            (data / name).chmod(0o440)
            (tmp_path / "secret" / name).symlink_to(Path("..data") / name)
    init, = pod.spec["initContainers"]
    shell, option, script = init["command"]
    for mount in init["volumeMounts"]:
        top = "/" + mount["mountPath"].split("/")[1]
        script = script.replace(f" {top}/", f" {tmp_path}{top}/")
    for _ in range(2):  # again after the node was restarted
        subprocess.run([shell, option, script], check=True)
    return tmp_path


@own_pod
def test_an_engine_gets_a_folder_that_is_its_own_for_tmp(pod: ManifestPod, tmp_path: Path) -> None:
    """Below an emptyDir itself it would put nothing."""
    keys = {"server.key": b"{}", "clients": b"", "node.key": b"{}"}
    base = prepared(pod, tmp_path, {} if pod.file == ENGINE else keys)
    with pytest.raises(private_paths.UnsafePath, match="others could replace"):
        private_paths.check_directory(base / "scratch" / "actorium-10001", make=True)
    mounts = {each["mountPath"]: each for each in pod.spec["containers"][0]["volumeMounts"]}
    own = base / "scratch" / mounts["/tmp"]["subPath"]
    assert stat.S_IMODE(own.stat().st_mode) & 0o777 == 0o700
    init = pod.spec["initContainers"][0]
    assert init["image"] == pod.spec["containers"][0]["image"]
    assert {"name": "scratch", "mountPath": "/scratch"} in init["volumeMounts"]


def test_keys_are_copied_so_that_they_are_taken(tmp_path: Path) -> None:
    """A Secret's files are refused: their group can read them."""
    made = tmp_path / "made"
    nodes = [*cluster_file(CLUSTER, tmp_path).nodes]
    make_keys(made, nodes)
    head, node = (next(pod for pod in PODS if pod.name == name)
                  for name in ("actorium-head", "actorium-node"))
    for pod, names in ((head, ("server.key", "clients")), (node, ("node.key",))):
        (tmp_path / pod.name).mkdir()
        secrets = {name: (made / name.replace("node.key", f"{nodes[0]}.key")).read_bytes()
                   for name in names}
        base = prepared(pod, tmp_path / pod.name, secrets)
        with pytest.raises(BadConfig, match="others can read"):
            curve_keys.read_pair(base / "secret" / names[0])
        mounts = {each["mountPath"]: each for each in pod.spec["containers"][0]["volumeMounts"]}
        keys = base / "private" / mounts["/keys"]["subPath"]
        keys = keys.rename(base / "keys")  # as it is mounted: the emptyDir is not above it
        assert curve_keys.read_pair(keys / names[0]).public
        assert {stat.S_IMODE((keys / name).stat().st_mode) for name in names} == {0o600}
        assert stat.S_IMODE(keys.stat().st_mode) & 0o777 == 0o700
    assert make_keys(tmp_path / "actorium-head/keys", nodes) == [], "none is missing"
    words = node.spec["containers"][0]["args"]
    assert words[words.index("--key") + 1] == "/keys/node.key"
    assert cluster_file(CLUSTER, tmp_path).keys == "/keys"
