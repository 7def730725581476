"""configs/kserve/ and configs/Containerfile: by KServe's schemas, and in agreement with the code they deploy."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml
from container_script import load_container_script

from gpt_fast.serve import metric_table
from gpt_fast.serve.model_yaml import read_model_yaml
from gpt_fast.serve.routes import ROUTES

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = json.loads((ROOT / "tests/data/kserve/schemas.json").read_text())
MANIFESTS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs/kserve").glob("*.yaml"))}
SERVICES = {name: found for name, found in MANIFESTS.items() if found["kind"] == "InferenceService"}
RUNTIME = MANIFESTS["runtime.yaml"]
CONTAINER = RUNTIME["spec"]["containers"][0]
IMAGE = (ROOT / "configs/Containerfile").read_text().replace("\\\n", " ")
FREE = ("annotations", "labels", "matchLabels", "limits", "requests")  # keys below these are anybody's
IN_IMAGE = "/opt/gpt-fast/"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_container_script()


def check(manifest: dict[str, Any]) -> None:
    schema = SCHEMAS[f"{manifest['apiVersion']}/{manifest['kind']}"]
    jsonschema.Draft202012Validator(schema).validate(manifest)


def keys(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key of ``node`` that the schema knows."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(key, str):
            yield (*path, key)
        if key not in FREE:
            yield from keys(value, (*path, key))


def settings(config: str = "model_config.yaml") -> dict[str, Any]:
    return dict(read_model_yaml(ROOT / config).config)


def port_of(address: str) -> int:
    """That of TorchServe's inference_address, and so on."""
    return int(re.findall(rf"(?m)^{address}=http://127\.0\.0\.1:(\d+)$", (ROOT / "config.properties").read_text())[0])


# --- the schemas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_what_kserve_takes(name: str) -> None:
    check(MANIFESTS[name])


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_misspelled_field_is_refused_wherever_it_is(name: str) -> None:
    paths = [("spec", *path) for path in keys(MANIFESTS[name]["spec"])]
    assert len(paths) > 10
    for *way, last in paths:
        wrong = copy.deepcopy(MANIFESTS[name])
        node = wrong
        for key in way:
            node = node[key]
        node[last + "x"] = node.pop(last)
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


def test_a_wrong_type_is_refused() -> None:
    for key, value in (
        ("minReplicas", "1"),
        ("terminationGracePeriodSeconds", 1.5),
        ("model", []),
        ("maxReplicas", None),
    ):
        wrong = copy.deepcopy(SERVICES["cpu.yaml"])
        wrong["spec"]["predictor"][key] = value
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


# --- manifests and code --------------------------------------------------------------------------------------------


def test_ports_are_those_of_torchserve() -> None:
    port = port_of("inference_address")
    assert [part["containerPort"] for part in CONTAINER["ports"]] == [port]
    assert RUNTIME["spec"]["annotations"]["prometheus.io/port"] == str(port)
    assert {CONTAINER[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "readiness", "liveness")} == {port}
    assert re.findall(r"(?m)^EXPOSE (.*)$", IMAGE) == [str(port)]


def test_probes_ask_for_routes_that_are_there(script: ModuleType) -> None:
    """/ping is TorchServe's own. It says Healthy while the model loads, so only the liveness probe may ask it."""
    assert {"health", "metrics"} <= {*ROUTES}
    for probe in ("startup", "readiness"):
        assert CONTAINER[f"{probe}Probe"]["httpGet"]["path"] == f"/predictions/{script.NAME}/1.0/health"
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/ping"
    assert RUNTIME["spec"]["annotations"]["prometheus.io/path"] == f"/predictions/{script.NAME}/1.0/metrics"


def config_of(service: dict[str, Any]) -> dict[str, Any]:
    """The model_config.yaml that a service runs with."""
    variables = {part["name"]: part.get("value") for part in service["spec"]["predictor"]["model"].get("env", [])}
    assert variables.keys() <= {"GPT_FAST_CONFIG"}
    return settings(variables.get("GPT_FAST_CONFIG", f"{IN_IMAGE}model_config.yaml").removeprefix(IN_IMAGE))


@pytest.mark.parametrize("name", SERVICES)
def test_the_startup_probe_waits_as_long_as_torchserve(name: str) -> None:
    probe = CONTAINER["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == config_of(SERVICES[name])["startupTimeout"]


@pytest.mark.parametrize("name", SERVICES)
def test_services_agree_with_the_runtime_and_the_code(name: str, script: ModuleType) -> None:
    service = SERVICES[name]
    predictor = service["spec"]["predictor"]
    model, defaults = predictor["model"], script.Settings.read({})
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    formats = {part["name"] for part in RUNTIME["spec"]["supportedModelFormats"]}
    assert model["modelFormat"]["name"] in formats
    assert service["metadata"]["name"] == f"gpt-fast-{name.removesuffix('.yaml')}"
    assert predictor["terminationGracePeriodSeconds"] >= defaults.drain_s + 20
    requests, limits = model["resources"]["requests"], model["resources"]["limits"]
    assert requests == limits, "cores and memory that come and go make a model slow or kill it"
    block = config_of(service)
    ranks = block.get("torchrun", {}).get("nproc-per-node")
    if ranks:
        assert int(limits["cpu"]) == ranks * (block["handler"]["threads"] or 1) + 1
    if "nvidia.com/gpu" in limits:
        assert int(limits["nvidia.com/gpu"]) == (ranks or 1)
        assert model["image"].endswith("-gpu")


@pytest.mark.parametrize("name", SERVICES)
def test_services_scale_on_metrics_that_are_there(name: str) -> None:
    (metric,) = SERVICES[name]["spec"]["predictor"]["autoScaling"]["metrics"]
    query = metric["external"]["metric"]["query"]
    gauges = {family.name for family in metric_table.FAMILIES if family.kind == "gauge"}
    asked = re.findall(r"vllm:(\w+)\{", query)
    assert set(asked) == {"num_requests_running", "num_requests_waiting"} <= gauges
    selected = set(re.findall(r'serving_kserve_io_inferenceservice="([^"]*)"', query))
    assert selected == {SERVICES[name]["metadata"]["name"]}
    assert metric["external"]["target"]["value"] == str(settings()["handler"]["max_batch"])


def test_what_is_written_has_a_volume_and_nothing_else_has(script: ModuleType) -> None:
    mounts = {part["name"]: part["mountPath"] for part in CONTAINER["volumeMounts"]}
    assert mounts == {"run": str(script.Settings.read({}).run), "shm": "/dev/shm"}
    assert {part["name"] for part in RUNTIME["spec"]["volumes"]} == mounts.keys()


def test_nothing_but_the_inference_port_is_reached_from_outside() -> None:
    policy = MANIFESTS["network.yaml"]["spec"]
    assert policy["podSelector"]["matchLabels"] == RUNTIME["spec"]["labels"]
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": port_of("inference_address")}]
    assert rule["from"], "everybody"


def test_the_container_may_do_as_little_as_possible() -> None:
    security = CONTAINER["securityContext"]
    assert security["runAsNonRoot"] is security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is security["privileged"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert f"USER {security['runAsUser']}:" in IMAGE
    assert all(not service["spec"]["predictor"]["automountServiceAccountToken"] for service in SERVICES.values())


def test_images_have_the_version_of_the_package() -> None:
    (version,) = re.findall(r'(?m)^version = "(.*)"$', (ROOT / "pyproject.toml").read_text())
    text = IMAGE + "".join(path.read_text() for path in (ROOT / "configs/kserve").glob("*.yaml"))
    tags = re.findall(r"gpt-fast:(\S+)", text)
    assert {*tags} == {f"{version}-cpu", f"{version}-gpu"}


# --- the container file --------------------------------------------------------------------------------------------


def stages() -> dict[str, str]:
    """The instructions of each stage by its name; ``final`` is the last."""
    parts = re.split(r"(?m)^FROM ", IMAGE)[1:]
    heads = [re.fullmatch(r"(\S+)(?: AS (\S+))?", part.splitlines()[0]) for part in parts]
    assert all(heads)
    return {(head[2] or "final"): part for head, part in zip(heads, parts, strict=True) if head}


def copied() -> dict[str, str]:
    """Where each path of the repository lies in the image that runs."""
    found = {}
    for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", stages()["run-cpu"]):
        *sources, target = line.split()
        for source in sources:
            found[source] = f"{target}{Path(source).name}" if target.endswith("/") else target
    return found


def test_what_is_copied_is_there_and_what_is_needed_is_copied() -> None:
    for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", IMAGE):
        assert all((ROOT / source).exists() for source in line.split()[:-1]), line
    needed = ("handler.py", "model_config.yaml", "config.properties", "configs", "scripts/container.py")
    assert copied() == {path: IN_IMAGE + path for path in needed}
    assert f'ENTRYPOINT ["python", "{copied()["scripts/container.py"]}"]' in IMAGE
    assert f'CMD ["python", "{copied()["scripts/container.py"]}", "healthy"]' in IMAGE


def test_kernels_lie_where_they_are_looked_for() -> None:
    (output,) = re.findall(r"gpt-fast kernels --output (\S+)", stages()["build"])
    assert f"COPY --from=build {output} {output}\n" in stages()["run-cpu"]
    assert f"GPT_FAST_KERNEL_DIR={output} " in stages()["run-cpu"]


def test_the_image_that_runs_has_no_compiler_and_is_not_root() -> None:
    found = stages()
    assert found.keys() == {"build", "run-cpu", "run-gpu", "final"}
    assert found["final"].strip() == "run-${DEVICE}"
    assert not re.search(r"\b(?:g\+\+|gcc|clang|build-essential)\b", found["run-cpu"])
    for name in ("run-cpu", "run-gpu"):
        user = re.findall(r"(?m)^USER (.*)$", found[name])[-1]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number: Kubernetes cannot see who a name is"


def test_the_base_image_is_pinned() -> None:
    (base,) = re.findall(r"(?m)^ARG BASE=(\S+)$", IMAGE)
    assert re.search(r":\d+\.\d+\.\d+-slim-\w+$", base)
    assert re.findall(r"(?m)^FROM (\S+)", IMAGE) == ["${BASE}", "${BASE}", "run-cpu", "run-${DEVICE}"]


def test_extras_of_the_image_are_extras_of_the_package() -> None:
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", IMAGE)
    known = re.findall(r"(?m)^(\w+) = \[$", (ROOT / "pyproject.toml").read_text())
    assert {"serve", *extras.split(",")} <= {*known}
    assert "serve" in extras.split(",")
