"""The application is built from a tree, a file and single settings; the Serve configuration that we ship is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from cluster.errors import ConfigurationError
from services.launch.ray.app import build_app, config_of, with_whole_paths

ROOT = Path(__file__).parents[4]


def test_sections_go_over_the_file_and_single_settings_over_both() -> None:
    config = config_of(
        {
            "target": {"replicas": 3},
            "ray": {"draft": {"num_gpus": 1}},
            "config": str(ROOT / "configs" / "ray-local.yaml"),
            "router.port": 9000,
            "target.engine_args": {},
            "ray.draft.max_replicas": "7",  # as `serve run` passes it
        }
    )
    assert config.target.replicas == 3
    assert config.target.model == "outrider-target-12m"
    assert (config.ray.draft.num_gpus, config.ray.draft.num_cpus, config.ray.draft.max_replicas) == (1, 0.5, 7)
    assert config.router.port == 9000


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"config": "/nowhere.yaml"}, "cannot read the configuration /nowhere.yaml"),
        ({"target.replica": 1}, "'replicas'"),
        ({"port": 1}, "write section.key=value"),
        ({"targets": {"replicas": 1}}, "unknown key 'targets'"),
        ({"simulation": {"loss": 0.1}}, "simulation.loss"),
    ],
)
def test_a_bad_argument_is_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        build_app(args)


def test_the_application_is_one_for_serve() -> None:
    assert isinstance(build_app({}), Application)


def test_the_serve_configuration_that_we_ship_is_one() -> None:
    tree = yaml.safe_load((ROOT / "deploy" / "ray" / "serve-config.yaml").read_text(encoding="utf-8"))
    schema = ServeDeploySchema.model_validate(tree)
    (application,) = schema.applications
    assert application.import_path == f"{build_app.__module__}:{build_app.__name__}"
    assert isinstance(build_app(application.args), Application)
    pools = {"router", "target", "draft"}
    assert {deployment.name for deployment in application.deployments} <= pools


def test_files_are_named_by_their_whole_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As replicas have a working directory of their own."""
    monkeypatch.chdir(tmp_path)
    tls = {"ca_file": "ca.crt", "certificate_file": "{program}.crt", "key_file": "{program}.key"}
    placed = with_whole_paths(config_of({"tls": tls, "router": {"api_keys_file": "keys"}}))
    assert placed.tls.certificate_file == f"{tmp_path}/{{program}}.crt"
    assert placed.router.api_keys_file == f"{tmp_path}/keys"
    assert placed.tls.token_file is None
