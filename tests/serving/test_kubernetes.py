"""The manifests of docs/serving/kubernetes, beside what the server really has: options, routes, metrics, seconds to end."""

from pathlib import Path

import pytest
import tyro
import yaml
from fakes import FakeEngine, talk

from llama_jax.cli.serve import KEY_VARIABLE, Serve
from llama_jax.serving.http.auth import Access
from llama_jax.serving.http.server import LAST_WORDS
from llama_jax.serving.http.service import ENGINE_SECONDS
from llama_jax.serving.options import CHUNK

FOLDER = Path(__file__).parents[2] / "docs" / "serving" / "kubernetes"
REPLICAS = list(yaml.safe_load_all((FOLDER / "replicas" / "deployment.yaml").read_text()))
GATEWAY = list(yaml.safe_load_all((FOLDER / "gateway.yaml").read_text()))


def of_kind(documents, kind, name="llama"):
    (found,) = [each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


@pytest.fixture
def deployment():
    return of_kind(REPLICAS, "Deployment")


def container_of(deployment):
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def options_of(deployment):
    command, *arguments = container_of(deployment)["args"]
    assert command == "serve"
    return tyro.cli(Serve, args=arguments)


def test_every_option_is_one_of_the_command(deployment):
    options = options_of(deployment)
    options._check()
    options._engine_options()
    container = container_of(deployment)
    (port,) = container["ports"]
    assert (port["containerPort"], options.host) == (options.port, "0.0.0.0")
    assert set(options.allow_host) >= {"llama"}  # as clients in the cluster ask for the service
    names = {variable["name"] for variable in container["env"]}
    assert KEY_VARIABLE in names
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(options.model.parent) in paths
    # All that is written goes to volumes: the rest of the file system is read-only.
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert paths >= {"/tmp", *(variable["value"] for variable in container["env"] if variable["name"] == "XDG_CACHE_HOME")}
    volumes = {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_probes_ask_for_what_answers_without_a_key(deployment):
    container, options = container_of(deployment), options_of(deployment)
    probes = {name: container[name + "Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert {probe["port"] for probe in probes.values()} == {container["ports"][0]["name"]}

    async def answers(client):
        # The kubelet asks the pod's own address.
        return [(await client.get(probe["path"], host="10.2.3.4:8000")).status for probe in probes.values()]

    access = Access(api_key="secret", hosts=(options.host, *options.allow_host))
    assert talk(FakeEngine(), answers, access=access) == [200, 200, 200]
    # A busy engine is not a wedged one: it is given its time first, and then again by the probe.
    assert container["livenessProbe"]["timeoutSeconds"] < options.wedged


def test_there_is_time_to_drain(deployment):
    pod, options = deployment["spec"]["template"]["spec"], options_of(deployment)
    waits = container_of(deployment)["lifecycle"]["preStop"]["sleep"]["seconds"]
    ending = options.drain + ENGINE_SECONDS + 2 * LAST_WORDS  # as `server._serve` has it
    assert waits + ending < pod["terminationGracePeriodSeconds"]
    # New requests go elsewhere before the server refuses them.
    assert waits >= container_of(deployment)["readinessProbe"]["periodSeconds"]


def test_the_picker_reads_gauges_that_there_are(deployment):
    (text,) = of_kind(GATEWAY, "ConfigMap", "llama-picker")["data"].values()
    config = yaml.safe_load(text)
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == plugins["core-metrics-extractor"]["defaultEngine"] == engine.pop("name")

    async def metrics(client):
        return await client.get("/metrics", host="10.2.3.4:8000")

    options = options_of(deployment)
    found = talk(FakeEngine(), metrics, access=Access(api_key="secret", open_metrics=options.open_metrics))
    assert found.status == 200
    assert set(engine) == {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"}
    for name in engine.values():
        assert f"# TYPE {name} gauge\n" in found.body.decode()
    # What it takes for read before is what the prefix cache keeps.
    assert plugins["approx-prefix-cache-producer"]["blockSizeTokens"] == CHUNK
    assert options.prefill_chunk is None
    for profile in config["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= set(plugins)
