"""What a release is made of says the same everywhere: versions, workflows of a public forge, the container file."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import tyro
import yaml

import llama_jax
from llama_jax.cli.serve import Serve

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def on(workflow):
    return workflow[True]  # YAML 1.1 reads the key `on` so


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == llama_jax.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{llama_jax.__version__}]" in changelog or f"What {llama_jax.__version__} will be" in changelog
    assert PROJECT.get("urls", {}).get("Repository") == citation.get("repository-code")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_do_no_more_than_it_needs(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    more = {job: rules["permissions"] for job, rules in workflow["jobs"].items() if "permissions" in rules}
    assert more == ({"publish": {"id-token": "write"}} if name == "release" else {})
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    assert "secrets." not in str(workflow)
    assert "pull_request_target" not in str(on(workflow))
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])
        # A value that strangers choose, such as the title of a pull request, never becomes a part of a command.
        assert not re.findall(r"\$\{\{(?! matrix\.)", step.get("run", ""))


def instructions():
    """(instruction, what follows) of the container file, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Containerfile").read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def the(instruction):
    *_, last = [value for name, value in instructions() if name == instruction]
    return last


def test_the_image_is_the_one_that_kubernetes_expects():
    documents = yaml.safe_load_all((ROOT / "docs/serving/kubernetes/replicas/deployment.yaml").read_text("utf-8"))
    pod = next(one for one in documents if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    security = pod["securityContext"]
    assert the("USER") == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert "command" not in container
    assert the("EXPOSE") == str(container["ports"][0]["containerPort"])
    assert {"XDG_CACHE_HOME=/cache", "PATH=/opt/llama-jax/bin:$PATH"} <= set(the("ENV").split())
    assert container["env"][-1] == {"name": "XDG_CACHE_HOME", "value": the("VOLUME")}
    assert container["livenessProbe"]["httpGet"]["path"] in the("HEALTHCHECK")
    page = (ROOT / "docs/serving/kubernetes/README.md").read_text("utf-8")
    assert f"docker build -t {container['image']} -f Containerfile ." in page


def test_the_image_runs_a_command_of_ours():
    assert json.loads(the("ENTRYPOINT")) == list(PROJECT["scripts"])
    command, *options = json.loads(the("CMD"))
    served = tyro.cli(Serve, args=options)
    assert (command, served.host, str(served.port)) == ("serve", "0.0.0.0", the("EXPOSE"))
    probe = json.loads(the("HEALTHCHECK").split("CMD", 1)[1])
    compile(probe[-1], "the health check", "exec")
    assert f"http://127.0.0.1:{served.port}/health" in probe[-1]
