"""Tests that the programs know the subcommands, flags and files in the commands of manifests and images."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.kuberay.rayservice import MANIFEST
from services.cli import make_parser
from tests.deploy.chart import VALUES, find, pods, render

DOCKERFILES = sorted((Path(__file__).parents[2] / "deploy" / "docker").glob("*Dockerfile"))
_KEYWORDS = {"until", "do", "done", "exec"}


def entry_point(dockerfile: Path, instruction: str) -> list[str]:
    """The words of the last ENTRYPOINT or CMD."""
    words: list[str] = json.loads(re.findall(rf"^{instruction} (\[.*\])$", dockerfile.read_text(), re.MULTILINE)[-1])
    return words


def commands(container: dict[str, Any]) -> list[list[str]]:
    """The commands that a container runs, those of its shell script one by one."""
    arguments = container.get("args", [])
    match container.get("command"):
        case None:
            return [[*entry_point(DOCKERFILES[0], "ENTRYPOINT"), *arguments]]
        case ["/bin/sh", "-c", script, *_]:
            lexer = shlex.shlex(
                script.replace('"$@"', shlex.join(arguments)).replace("\n", ";"), punctuation_chars=True
            )
            lexer.whitespace_split = True
            lexer.commenters = ""
            return list(_split(shlex.split(word)[0] if word[0] in "\"'" else word for word in lexer))
        case command:
            return [[*command, *arguments]]


def _split(words: Iterator[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in words:
        if set(word) <= set("&;|") or word in _KEYWORDS:
            if command:
                yield command
            command = []
        else:
            command.append(word)
    if command:
        yield command


def check(command: list[str]) -> None:
    """Fails where the program would not take its arguments."""
    program, *arguments = command
    if program == "outrider":
        try:
            make_parser().parse_args(arguments)
        except SystemExit as ended:
            if ended.code:
                raise AssertionError(f"outrider does not know {shlex.join(arguments)}") from ended
    elif program == "ray":
        if importlib.util.find_spec("ray") is not None:
            scripts = importlib.import_module("ray.scripts.scripts")
            scripts.cli.commands[arguments[0]].make_context(arguments[0], arguments[1:])  # raises click's exception
    else:
        assert program == "sleep", f"{program}: a program that was not expected"


def check_all(container: dict[str, Any]) -> None:
    for command in commands(container):
        check(command)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_programs_know_what_containers_pass_them(values: dict[str, Any]) -> None:
    documents = render(values)
    templates = [pod for document in documents if document["kind"] != "RayService" for pod in pods(document)]
    assert templates or values.get("mode") == "ray"
    for pod in templates:
        for container in pod["spec"]["containers"]:
            check_all(container)
            for command in commands(container):
                if command[0] == "outrider":
                    config = make_parser().parse_args(command[1:]).config
                    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == str(config.parent)]
                    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == mount["name"]]
                    assert config.name in find(documents, "ConfigMap", volume["configMap"]["name"])["data"]


def test_ray_knows_what_its_nodes_are_started_with_and_serve_what_it_runs() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    manifests = [*render(VALUES["ray"]), *render(VALUES["ray-autoscaling"]), *yaml.safe_load_all(MANIFEST.read_text())]
    services = [document["spec"] for document in manifests if document["kind"] == "RayService"]
    assert len(services) == 3
    for service in services:
        cluster = service["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            # KubeRay runs `ray start` with them.
            flags = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
            scripts.start.make_context("start", flags)
            for container in group["template"]["spec"]["containers"]:
                assert not {"command", "args"} & container.keys()
        for application in yaml.safe_load(service["serveConfigV2"])["applications"]:
            module, _, name = application["import_path"].partition(":")
            assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_start_the_program(dockerfile: Path) -> None:
    assert entry_point(dockerfile, "ENTRYPOINT") == ["outrider"]
    check([*entry_point(dockerfile, "ENTRYPOINT"), *entry_point(dockerfile, "CMD")])


@pytest.mark.parametrize(
    "container",
    [
        {"args": ["target", "--confug", "/etc/outrider/cluster.yaml"]},
        {"args": ["targets"]},
        {"command": ["/bin/sh", "-c", 'ray start --head && exec outrider "$@"', "sh"], "args": ["target", "--no-such"]},
        {"command": ["python", "-m", "outrider"]},
    ],
    ids=["a flag", "a subcommand", "a flag in a script", "a program"],
)
def test_what_is_not_known_is_found(container: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_all(container)


def test_a_flag_that_ray_has_not_is_found() -> None:
    click = pytest.importorskip("click")
    pytest.importorskip("ray")
    script = {"command": ["/bin/sh", "-c", 'until ray start --adress="$A:6379"; do sleep 2; done']}
    assert [command[0] for command in commands(script)] == ["ray", "sleep"]
    with pytest.raises(click.NoSuchOption):
        check(commands(script)[0])
