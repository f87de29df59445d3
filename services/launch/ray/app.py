"""The application: `services.launch.ray.app:build_app` is its import path, for `serve run`, KubeRay and so on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.config import Config
from cluster.config.file import parse_config, read_tree
from cluster.config.types import Section
from cluster.errors import ConfigurationError
from services.launch.ray.options import DeploymentOptions, deployment_options
from services.launch.ray.replica import ProgramReplica
from services.launch.ray.router_replica import RouterReplica


def build_app(args: Mapping[str, Any]) -> Application:
    """Returns the application of the configuration in `args`. Raises ConfigurationError.

    `args` has sections of the tree, which override those of the file `config` if there is one, and single settings,
    `section.key: value`, which override both.

        serve run services.launch.ray.app:build_app config=configs/ray-local.yaml target.replicas=2
    """
    return build_configured_app(config_of(args))


def config_of(args: Mapping[str, Any]) -> Config:
    """Returns the configuration that the application's `args` give. Raises ConfigurationError."""
    tree: dict[str, Any] = {}
    overrides = []
    for key, value in args.items():
        if key == "config":
            tree = _merged(read_tree(Path(value)), tree)
        elif "." in key:
            overrides.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
        elif isinstance(value, Mapping):
            tree = _merged(tree, {key: value})
        else:
            raise ConfigurationError(f"cannot apply {key}={value!r}: write section.key=value, or config=FILE")
    return parse_config(tree, overrides)


def build_configured_app(config: Config) -> Application:
    """Raises ConfigurationError."""
    router, *workers = deployment_options(config)
    tree = with_whole_paths(config).model_dump(mode="json")
    pools = [_deployment(ProgramReplica, pool).bind(pool.name, tree) for pool in workers]
    application: Application = _deployment(RouterReplica, router).bind(router.name, tree, *pools)
    return application


def _deployment(replica: type[ProgramReplica], options: DeploymentOptions) -> Any:
    return serve.deployment(replica).options(**options.keywords())


def with_whole_paths(config: Config) -> Config:
    """Returns `config` with absolute paths of model folders and files, as replicas have another working directory."""
    update: dict[str, Any] = {
        name: section.model_copy(
            update=_whole_files(section) | ({"model": _whole_path(section.model)} if hasattr(section, "model") else {})
        )
        for name, section in ((name, getattr(config, name)) for name in ("router", "target", "draft", "tls"))
    }
    further = {
        name: drafts.model_copy(update={"draft": drafts.draft | {"model": _whole_path(drafts.draft["model"])}})
        if "model" in drafts.draft
        else drafts
        for name, drafts in config.ray.further_drafts.items()
    }
    return config.model_copy(update=update | {"ray": config.ray.model_copy(update={"further_drafts": further})})


def _whole_files(section: Section) -> dict[str, Any]:
    """Returns the file settings of `section` with absolute paths."""
    return {
        name: os.path.abspath(os.path.expanduser(path)) for name, path in section if name.endswith("_file") and path
    }


def _whole_path(model: str) -> str:
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `below` overridden by `above`, section by section."""
    merged = dict(below)
    for key, value in above.items():
        is_section = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if is_section else value
    return merged
