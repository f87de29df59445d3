"""The Helm chart: what it renders is what Kubernetes, KubeRay and our own programs take; wrong values are refused."""

from __future__ import annotations

from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from cluster.config.file import parse_config
from deploy.grafana.dashboards import DASHBOARDS, FOLDER
from deploy.helm.render import join
from deploy.helm.render import render as render_texts
from deploy.helm.values import CHART, SCHEMA, Values, make_schema
from deploy.kuberay.rayservice import MANIFEST, make_manifest
from tests.deploy.chart import DASHBOARDS_AND_ALERTS, VALUES, find, pods, render
from tests.deploy.custom_resources import CUSTOM
from tests.deploy.golden import GOLDEN, golden_file, read_values

VERSIONS = ("1.33", "1.37")
GATEWAY = {"enabled": True, "parentRefs": [{"name": "g"}], "endpointPicker": {"name": "p"}}
INCREMENTAL = {"strategy": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "istio"}


def over_two_nodes(**target: Any) -> dict[str, Any]:
    return {
        "config": {"target": {"engine": "vllm", "tensor_parallel_size": 8} | target},
        "target": {"gpus": 4, "nodesPerReplica": 2, "rayTokenSecret": "ray"},
    }


def check_objects(documents: list[dict[str, Any]]) -> None:
    for document in documents:
        checked = [document]
        if model := CUSTOM.get(document["kind"]):
            model.model_validate(document)
            # Nobody else looks into the pods of a custom resource.
            checked = [
                {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": "pod", **pod["metadata"]}}
                for pod in pods(document)
            ]
        for one in checked:
            for version in VERSIONS:
                kubernetes_validate.validate(one, version, strict=True)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_object_is_valid(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == report["errors"] == []
    check_objects(render(values))


@pytest.mark.parametrize("case", GOLDEN)
def test_what_is_rendered_is_as_it_was(case: str) -> None:
    assert golden_file(case).read_text(encoding="utf-8") == join(render_texts(read_values(case))), (
        "if it is meant to differ: `make docs`, or python -m tests.deploy.golden"
    )


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in golden_file("any").parent.iterdir()} == set(GOLDEN)


def test_the_manifest_without_helm_is_what_the_chart_renders() -> None:
    text = MANIFEST.read_text(encoding="utf-8")
    assert text == make_manifest(), "run `make docs`, or python -m deploy.kuberay.rayservice"
    documents = list(yaml.safe_load_all(text))
    check_objects(documents)
    assert "Helm" not in text.split("kind:", 1)[1]
    service = find(documents, "RayService", "outrider")["spec"]
    assert service["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
    assert "externalStorageNamespace" not in service["rayClusterConfig"]["gcsFaultToleranceOptions"]
    application = yaml.safe_load(service["serveConfigV2"])["applications"][0]
    config = parse_config(application["args"], ())
    assert service["rayClusterDeletionDelaySeconds"] > max(config.target.drain_seconds, config.router.drain_seconds)
    groups = service["rayClusterConfig"]["workerGroupSpecs"]
    for pool in (config.ray.target, config.ray.draft):
        (group,) = [group for group in groups if group["labels"] == pool.label_selector]
        assert group["maxReplicas"] >= pool.max_replicas


def test_only_the_head_that_scales_has_an_account_with_rights() -> None:
    for case in ("ray", "ray-autoscaling"):
        documents = render(VALUES[case])
        head, *workers = pods(find(documents, "RayService", "demo"))
        scales = case == "ray-autoscaling"
        assert head["spec"]["automountServiceAccountToken"] is scales
        assert (head["spec"]["serviceAccountName"] == "demo-autoscaler") is scales
        for pod in workers:
            assert pod["spec"]["serviceAccountName"] == "demo"
            assert pod["spec"]["automountServiceAccountToken"] is False
        accounts = {one["metadata"]["name"] for one in documents if one["kind"] == "ServiceAccount"}
        assert accounts == {pod["spec"]["serviceAccountName"] for pod in (head, *workers)}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_configuration_is_one_for_our_programs(values: dict[str, Any]) -> None:
    documents = render(values)
    if values.get("mode") == "ray":
        application = yaml.safe_load(find(documents, "RayService", "demo")["spec"]["serveConfigV2"])["applications"][0]
        config = parse_config(application["args"], ())
        assert config.router.host == "0.0.0.0"
        assert config.router.port not in (0, 8000)  # of Serve's proxy, in the same pods
    else:
        config = parse_config(yaml.safe_load(find(documents, "ConfigMap", "demo")["data"]["cluster.yaml"]), ())
        assert config.target.listen_address == "0.0.0.0:7000"
        assert config.target.addresses == ("dns:demo-target:7000",)
        assert config.router.host == "0.0.0.0"
    for section, settings in values.get("config", {}).items():
        for name, value in settings.items():
            set_to = getattr(getattr(config, section), name)
            assert set_to | value == set_to if isinstance(value, dict) else set_to == value


def test_what_serve_is_given_is_its_schema() -> None:
    schema = pytest.importorskip("ray.serve.schema")
    for name in ("ray", "ray-autoscaling"):
        text = find(render(VALUES[name]), "RayService", "demo")["spec"]["serveConfigV2"]
        schema.ServeDeploySchema.model_validate(yaml.safe_load(text))


def test_draft_workers_are_where_the_configuration_has_them() -> None:
    def kinds(name: str) -> list[str]:
        return [document["metadata"]["name"] for document in render(VALUES[name]) if document["kind"] == "Deployment"]

    assert kinds("defaults") == ["demo-router", "demo-draft"]
    for name in ("no speculation", "the engine drafts", "no draft workers", "drafts in process", "sidecars"):
        assert kinds(name) == ["demo-router"], name
    target = find(render(VALUES["sidecars"]), "StatefulSet", "demo-target")["spec"]["template"]["spec"]
    assert [container["name"] for container in target["containers"]] == ["target", "draft"]
    config = yaml.safe_load(find(render(VALUES["sidecars"]), "ConfigMap", "demo")["data"]["cluster.yaml"])
    assert config["draft"]["addresses"] == ["127.0.0.1:7001"] == [config["draft"]["listen"]]


def test_a_draft_on_its_targets_host_has_a_thread_for_each_core_of_its_container() -> None:
    documents = render(VALUES["host-cpu"])
    assert not [document for document in documents if document["metadata"]["name"] == "demo-draft"]
    target = find(documents, "StatefulSet", "demo-target")["spec"]["template"]["spec"]
    draft = next(container for container in target["containers"] if container["name"] == "draft")
    assert "nvidia.com/gpu" not in draft["resources"]["limits"]
    config = yaml.safe_load(find(documents, "ConfigMap", "demo")["data"]["cluster.yaml"])
    assert (config["draft"]["threads"], draft["resources"]["requests"]["cpu"]) == (16, "16")
    assert config["draft"]["listen"] == "127.0.0.1:7001"


def test_pods_have_as_long_as_their_programs_drain() -> None:
    documents = render(VALUES["gpus"])
    pod = find(documents, "StatefulSet", "demo-target")["spec"]["template"]["spec"]
    before_sigterm = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > 300 + before_sigterm
    router = find(documents, "Deployment", "demo-router")["spec"]["template"]["spec"]
    assert 30 < router["terminationGracePeriodSeconds"] < 300
    service = find(render(VALUES["ray"]), "RayService", "demo")["spec"]
    assert service["rayClusterDeletionDelaySeconds"] > 100


def test_only_routers_reach_targets_and_only_targets_reach_drafts() -> None:
    documents = render({})
    for pool, caller in (("target", "router"), ("draft", "target")):
        rules = find(documents, "NetworkPolicy", f"demo-{pool}")["spec"]["ingress"]
        (peers,) = [rule["from"] for rule in rules if rule["ports"][0]["port"] == "grpc"]
        (peer,) = peers
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == caller
        pods = find(documents, "StatefulSet" if pool == "target" else "Deployment", f"demo-{pool}")
        labels = find(documents, "NetworkPolicy", f"demo-{pool}")["spec"]["podSelector"]["matchLabels"]
        assert labels == pods["spec"]["selector"]["matchLabels"] == pods["spec"]["template"]["metadata"]["labels"]


def ports_called(documents: list[dict[str, Any]], name: str) -> list[tuple[list[Any], Any]]:
    """The calls that a NetworkPolicy allows: ports, and the labels of the called pods; None: anyone."""
    policy = find(documents, "NetworkPolicy", name)["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    calls = []
    for rule in policy["egress"]:
        peers = rule.get("to", [None])
        assert len(peers) == 1
        labels = peers[0] and peers[0]["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component", "group")
        calls.append(([port["port"] for port in rule.get("ports", [])], labels))
    return calls


def test_pods_call_their_workers_and_what_is_allowed_and_nothing_else() -> None:
    always: list[tuple[list[Any], Any]] = [([53, 53, 5353, 5353], None), ([443], None)]
    documents = render({})
    assert ports_called(documents, "demo-router") == [*always, ([7000], "target")]
    assert ports_called(documents, "demo-target") == [*always, ([7001], "draft")]
    assert ports_called(documents, "demo-draft") == always
    assert ports_called(render(VALUES["sidecars"]), "demo-target") == always
    assert ports_called(render(VALUES["two-nodes-a-target"]), "demo-target-group") == [*always, ([], "group")]
    assert ports_called(render(VALUES["ray"]), "demo-ray") == [*always, ([], "ray")]
    calls = ports_called(render(VALUES["ray-autoscaling"]), "demo-ray")
    assert calls == [*always, ([], "ray"), ([6379], None), ([443, 6443], None)]


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://otel:4318", 4318), ("https://a.b:99/x:1/", 99), ("http://otel", 80), ("https://otel/v1", 443)],
)
def test_spans_reach_their_collector(endpoint: str, port: int) -> None:
    values = {"config": {"tracing": {"endpoint": endpoint}}, "networkPolicy": {"egress": []}}
    assert ports_called(render(values), "demo-draft") == [([53, 53, 5353, 5353], None), ([port], None)]


def test_an_image_may_be_named_by_its_digest() -> None:
    digest = f"sha256:{'0a' * 32}"
    documents = render({"image": {"digests": {"vllm-cuda": digest}}, "target": {"image": "vllm-cuda"}})
    (target,) = pods(find(documents, "StatefulSet", "demo-target"))
    (draft,) = pods(find(documents, "Deployment", "demo-draft"))
    assert target["spec"]["containers"][0]["image"] == f"outrider:0.1.1-vllm-cuda@{digest}"
    assert draft["spec"]["containers"][0]["image"] == "outrider:0.1.1-cpu"


def test_without_keys_nothing_is_rendered_unless_routers_are_open() -> None:
    for mode in ("plain", "ray"):
        with pytest.raises(helm_python.HelmError, match=r"router\.apiKeysSecret is empty.*router\.open"):
            render_texts({"mode": mode})
        assert render_texts({"mode": mode, "router": {"apiKeysSecret": "keys"}})
        assert render_texts({"mode": mode, "router": {"open": True}})


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_volumes_of_a_node_are_limited_and_only_the_autoscaler_has_a_token(values: dict[str, Any]) -> None:
    for document in render(values):
        for pod in pods(document):
            for volume in pod["spec"]["volumes"]:
                assert volume.get("emptyDir", {"sizeLimit": ""}).keys() >= {"sizeLimit"}, volume
            scales = pod["spec"]["serviceAccountName"] == "demo-autoscaler"
            assert pod["spec"]["automountServiceAccountToken"] is scales


def test_every_metrics_page_is_scraped_and_reachable() -> None:
    documents = render(VALUES["sidecars"] | {"networkPolicy": {"clients": [{"podSelector": {}}]}})
    for pool, ports in (("router", ["http"]), ("target", ["metrics", "draft-metrics"])):
        endpoints = find(documents, "PodMonitor", f"demo-{pool}")["spec"]["podMetricsEndpoints"]
        assert [endpoint["port"] for endpoint in endpoints] == ports
        rules = find(documents, "NetworkPolicy", f"demo-{pool}")["spec"]["ingress"]
        open_to_monitoring = [
            port["port"] for rule in rules for port in rule["ports"] if {"namespaceSelector": {}} in rule["from"]
        ]
        assert open_to_monitoring == ports


def test_secrets_are_where_they_are_needed_and_nowhere_else() -> None:
    documents = render(VALUES["secured"])
    config = parse_config(yaml.safe_load(find(documents, "ConfigMap", "demo")["data"]["cluster.yaml"]), ())
    files = {
        "router": [config.router.api_keys_file, config.router.admin_keys_file, config.router.metrics_token_file],
        "target": [config.target.metrics_token_file],
        "draft": [config.draft.metrics_token_file],
    }
    files["router"] += [config.router.tls_certificate_file, config.router.tls_key_file]
    for pool, own in files.items():
        (pod,) = pods(find(documents, "StatefulSet" if pool == "target" else "Deployment", f"demo-{pool}"))
        (container,) = pod["spec"]["containers"]
        folders = {one["mountPath"] for one in container["volumeMounts"] if "secrets" in one["mountPath"]}
        used = [*own, config.tls.ca_file, config.tls.certificate_file, config.tls.key_file, config.tls.token_file]
        assert folders == {str(file).rpartition("/")[0] for file in used}
        mounted = {one["name"] for one in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["spec"]["volumes"]} == mounted


def test_probes_and_scrapes_pass_where_all_others_are_asked_who_they_are() -> None:
    documents = render(VALUES["secured"])
    config = parse_config(yaml.safe_load(find(documents, "ConfigMap", "demo")["data"]["cluster.yaml"]), ())
    for pool, kind, worker in (("target", "StatefulSet", config.target), ("draft", "Deployment", config.draft)):
        (pod,) = pods(find(documents, kind, f"demo-{pool}"))
        (container,) = pod["spec"]["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert worker.health_listen == f"0.0.0.0:{container[probe]['grpc']['port']}"
            assert worker.health_listen != worker.listen
    (pod,) = pods(find(documents, "Deployment", "demo-router"))
    (container,) = pod["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    for pool, server_name in (("router", "api.example"), ("target", "outrider"), ("draft", "outrider")):
        (endpoint,) = find(documents, "PodMonitor", f"demo-{pool}")["spec"]["podMetricsEndpoints"]
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["serverName"] == server_name
        assert ("cert" in endpoint["tlsConfig"]) == (pool != "router")  # only workers ask for one
        assert endpoint["authorization"]["credentials"] == {"name": "outrider-metrics", "key": "token"}


def test_every_node_of_ray_has_the_secrets() -> None:
    service = find(render(VALUES["ray-secured"]), "RayService", "demo")
    for pod in pods(service):
        (container,) = pod["spec"]["containers"]
        folders = [one["mountPath"] for one in container["volumeMounts"] if "secrets" in one["mountPath"]]
        assert len(folders) == 6
    application = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]
    config = parse_config(application["args"], ())
    assert config.tls.is_on
    assert config.router.scheme == "https"


def test_a_target_over_nodes_is_found_by_its_leader_alone() -> None:
    documents = render(VALUES["two-nodes-a-target"])
    group = find(documents, "LeaderWorkerSet", "demo-targets")
    assert (group["spec"]["replicas"], group["spec"]["leaderWorkerTemplate"]["size"]) == (2, 2)
    assert not [one for one in documents if one["kind"] == "StatefulSet"]
    leader, node = pods(group)
    service = find(documents, "Service", "demo-target")["spec"]
    monitor = find(documents, "PodMonitor", "demo-target")["spec"]
    assert service["selector"] == monitor["selector"]["matchLabels"] == leader["metadata"]["labels"]
    assert node["metadata"]["labels"] != service["selector"]
    # The controller's own service: with ours by that name nodes would wait for a leader that waits for them.
    assert group["metadata"]["name"] not in [one["metadata"]["name"] for one in documents if one["kind"] == "Service"]
    for pod in (leader, node):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
        assert {"VLLM_HOST_IP", "RAY_AUTH_TOKEN"} <= {variable["name"] for variable in container["env"]}
    assert "readinessProbe" in leader["spec"]["containers"][0]
    assert "readinessProbe" not in node["spec"]["containers"][0]
    config = yaml.safe_load(find(documents, "ConfigMap", "demo")["data"]["cluster.yaml"])
    assert config["target"]["engine_args"] == {"enforce_eager": True, "distributed_executor_backend": "ray"}


def test_the_pods_of_a_group_reach_each_other_and_go_one_group_at_a_time() -> None:
    documents = render(VALUES["two-nodes-a-target"])
    policy = find(documents, "NetworkPolicy", "demo-target-group")["spec"]
    budget = find(documents, "PodDisruptionBudget", "demo-target")["spec"]
    ((peer,),) = [rule["from"] for rule in policy["ingress"]]
    assert policy["podSelector"] == peer["podSelector"] == budget["selector"]
    (expression,) = budget["selector"]["matchExpressions"]
    labels = [pod["metadata"]["labels"] for pod in pods(find(documents, "LeaderWorkerSet", "demo-targets"))]
    assert expression["values"] == [one["app.kubernetes.io/component"] for one in labels]
    for one in labels:
        assert budget["selector"]["matchLabels"].items() <= one.items()


def test_dashboards_and_alerts_are_those_of_the_files() -> None:
    documents = render(DASHBOARDS_AND_ALERTS)
    uploaded = find(documents, "ConfigMap", "demo-dashboards")
    assert uploaded["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert uploaded["data"] == {f"outrider-{one.path.name}": one.path.read_text(encoding="utf-8") for one in DASHBOARDS}
    rules = find(documents, "PrometheusRule", "demo")
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    assert rules["spec"] == yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))
    other = render({"grafana": {"dashboards": {"enabled": True, "labels": {"board": "yes"}}}})
    labels = find(other, "ConfigMap", "demo-dashboards")["metadata"]["labels"]
    assert labels["board"] == "yes"


def test_the_ports_of_a_ray_node_differ() -> None:
    for case in ("ray", "ray-autoscaling"):
        cluster = find(render(VALUES[case]), "RayService", "demo")["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            ports = group["template"]["spec"]["containers"][0]["ports"]
            numbers = {port["name"]: port["containerPort"] for port in ports}
            assert len(set(numbers.values())) == len(ports)
            # KubeRay would add one named `metrics`, and the flag, with its own default.
            assert str(numbers["metrics"]) == group["rayStartParams"]["metrics-export-port"]


def test_containers_may_do_little() -> None:
    for document in (*render({}), *render(VALUES["sidecars"])):
        if document["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"config": {"target": {"max_modle_len": 100}}}, "max_modle_len"),
        ({"config": {"target": {"replicas": "two"}}}, "/config/target/replicas"),
        ({"config": {"speculation": {"controller": "best"}}}, "/config/speculation/controller"),
        ({"config": {"ray": {"draft": {"num_gpu": 1}}}}, "num_gpu"),
        ({"mode": "swarm"}, "/mode"),
        ({"routers": {}}, "routers"),
        ({"target": {"gpus": -1}}, "/target/gpus"),
        ({"target": {"nodesPerReplica": 0}}, "/target/nodesPerReplica"),
        ({"router": {"service": {"port": 70000}}}, "/router/service/port"),
        ({"ray": {"workerGroups": [{"replicas": 1}]}}, "name"),
        ({"ray": {"upgrade": {"strategy": "Blue"}}}, "/ray/upgrade/strategy"),
        ({"ray": {"upgrade": {"stepSizePercent": 0}}}, "/ray/upgrade/stepSizePercent"),
        ({"ray": {"autoscaling": {"enable": True}}}, "enable"),
        ({"grafana": {"dashboard": {}}}, "dashboard"),
        ({"target": {"shmSize": "8 Gi"}}, "/target/shmSize"),
        ({"image": {"digests": {"cpu": "latest"}}}, "/image/digests/cpu"),
        ({"ray": {"auth": "disabled"}}, "auth"),
        ({"modelCache": {"size": "500Gib"}}, "/modelCache/size"),
        ({"prometheusRules": {"enabled": "on"}}, "/prometheusRules/enabled"),
        ({"gateway": {"endpointPicker": {"failureMode": "Open"}}}, "/gateway/endpointPicker/failureMode"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"config": {"draft": {"placement": "sidecar", "replicas": 2}}}, "config.draft.replicas 2"),
        ({"config": {"draft": {"placement": "host-cpu"}}, "draft": {"gpus": 1}}, "draft.gpus 1"),
        (
            {"config": {"draft": {"placement": "host-cpu"}}, "draft": {"resources": {"requests": {"cpu": "500m"}}}},
            'draft.resources.requests.cpu "500m"',
        ),
        ({"draft": {"autoscaling": {"enabled": True}}}, "draft.autoscaling.metric"),
        ({"target": {"autoscaling": {"enabled": True}}}, "target.autoscaling.metric"),
        ({"mode": "ray", "config": {"router": {"port": 8000}}}, "config.router.port 8000"),
        ({"mode": "ray", "config": {"router": {"port": 8090}}}, "config.router.port 8090"),
        ({"mode": "ray", "config": {"router": {"port": 0}}}, "config.router.port 0"),
        (over_two_nodes() | {"target": {"gpus": 4, "nodesPerReplica": 2}}, "target.rayTokenSecret"),
        (over_two_nodes(engine="torch"), "target.nodesPerReplica 2.* not torch"),
        (over_two_nodes(engine="simulated"), "target.nodesPerReplica 2.* not simulated"),
        (over_two_nodes(tensor_parallel_size=3), "target.nodesPerReplica 2.*tensor_parallel_size 3"),
        (over_two_nodes(tensor_parallel_size=16), "target.gpus 4.*needs 8 of each"),
        (over_two_nodes(engine_args={"distributed_executor_backend": "mp"}), "distributed_executor_backend"),
        (over_two_nodes() | {"mode": "ray"}, "target.nodesPerReplica 2: in mode ray"),
        ({"tls": {"tokenSecret": "t"}}, "tls.tokenSecret t: a token needs certificates"),
        ({"tls": {"secretName": "t"}}, "tls.serverName"),
        ({"router": {"tlsSecret": "t"}, "podMonitor": {"enabled": True}}, "router.tlsServerName"),
        ({"gateway": GATEWAY | {"parentRefs": []}}, "gateway.parentRefs"),
        ({"gateway": GATEWAY | {"endpointPicker": {}}}, "gateway.endpointPicker.name"),
        ({"gateway": GATEWAY, "mode": "ray"}, "gateway.enabled: in mode ray"),
        ({"gateway": GATEWAY, "router": {"tlsSecret": "t"}}, "router.tlsSecret t"),
        ({"mode": "ray", "ray": {"upgrade": INCREMENTAL}}, "ray.autoscaling.enabled"),
        (
            {
                "mode": "ray",
                "ray": {"autoscaling": {"enabled": True}, "upgrade": INCREMENTAL | {"gatewayClassName": ""}},
            },
            "ray.upgrade.gatewayClassName",
        ),
        (
            {
                "mode": "ray",
                "ray": {"autoscaling": {"enabled": True}, "upgrade": INCREMENTAL | {"stepSizePercent": 50}},
            },
            "ray.upgrade.stepSizePercent 50",
        ),
        ({"mode": "ray", "ray": {"workerGroups": [{"name": "a"}, {"name": "a"}]}}, "two have the name a"),
        ({"mode": "ray", "ray": {"workerGroups": [{"name": "a", "maxReplicas": 2}]}}, "ray.autoscaling.enabled"),
        (
            {
                "mode": "ray",
                "ray": {"autoscaling": {"enabled": True}, "workerGroups": [{"name": "a", "minReplicas": 2}]},
            },
            "minReplicas 2",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=named):
        render(values)


def test_the_schema_and_the_defaults_are_those_of_the_declarations() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == make_schema(), "run `make docs`"
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert Values.model_validate(defaults) == Values()
    assert defaults | {"config": None} == Values().model_dump(mode="json") | {"config": None}


def test_a_gateways_pool_has_the_pods_and_the_port_of_the_routers() -> None:
    documents = render({"gateway": GATEWAY})
    pool = find(documents, "InferencePool", "demo")
    (template,) = pods(find(documents, "Deployment", "demo-router"))
    assert template["metadata"]["labels"].items() >= pool["spec"]["selector"]["matchLabels"].items()
    (port,) = template["spec"]["containers"][0]["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    (rule,) = find(documents, "HTTPRoute", "demo")["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]


def test_a_pool_that_scales_leaves_its_replicas_to_the_autoscaler() -> None:
    documents = render(VALUES["autoscaling"])
    for pool, kind, metric in (
        ("router", "Deployment", "cpu"),
        ("target", "StatefulSet", "outrider_targets_wanted"),
        ("draft", "Deployment", "outrider_draft_workers_wanted"),
    ):
        assert "replicas" not in find(documents, kind, f"demo-{pool}")["spec"]
        scaler = find(documents, "HorizontalPodAutoscaler", f"demo-{pool}")["spec"]
        assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": kind, "name": f"demo-{pool}"}
        assert scaler["minReplicas"] < scaler["maxReplicas"]
        assert metric in str(scaler["metrics"])


@pytest.mark.parametrize(("case", "claim"), [("model-cache", "demo-models"), ("model-cache-claim", "models")])
def test_all_pods_share_the_models_of_a_claim(case: str, claim: str) -> None:
    documents = render(VALUES[case])
    templates = [template for document in documents for template in pods(document)]
    assert len(templates) == 3
    for template in templates:
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"] == {"claimName": claim}
    claims = [document["spec"] for document in documents if document["kind"] == "PersistentVolumeClaim"]
    made = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "200Gi"}},
    }
    assert claims == ([made] if case == "model-cache" else [])
    secrets = [template["spec"].get("imagePullSecrets") for template in templates]
    assert secrets == [None if case == "model-cache" else [{"name": "registry"}]] * 3
    assert str(templates).count("HF_TOKEN") == (3 if case == "model-cache" else 0)


def test_only_the_named_clients_reach_the_routers() -> None:
    documents = render(VALUES["network-policies"])
    (rule,) = find(documents, "NetworkPolicy", "demo-router")["spec"]["ingress"]
    apps = {"namespaceSelector": {"matchLabels": {"name": "apps"}}}
    assert rule["from"] == [apps, {"namespaceSelector": {}}]  # the second for the metrics page
    service = find(documents, "Service", "demo")
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert (service["spec"]["type"], service["spec"]["ports"][0]["port"]) == ("LoadBalancer", 443)


def test_protection_can_be_left_to_others() -> None:
    def kinds(case: str) -> set[str]:
        return {document["kind"] for document in render(VALUES[case])}

    assert kinds("defaults") - kinds("unprotected") == {"NetworkPolicy", "PodDisruptionBudget"}


def test_each_pool_is_on_its_own_gpus_and_drafts_near_their_targets() -> None:
    documents = render(VALUES["gpus"])
    for kind, pool, gpus, product in (
        ("StatefulSet", "target", "4", "A100-SXM4-80GB"),
        ("Deployment", "draft", "1", "A10G"),
    ):
        (template,) = pods(find(documents, kind, f"demo-{pool}"))
        (container,) = template["spec"]["containers"]
        assert container["image"] == "outrider:0.1.1-vllm-cuda"
        for amount in container["resources"].values():
            assert amount["nvidia.com/gpu"] == gpus
        assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": f"NVIDIA-{product}"}
        assert template["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    affinity = template["spec"]["affinity"]["podAffinity"]
    assert "kubernetes.io/hostname" in str(affinity)
    assert "target" in str(affinity)


def test_replicas_and_budgets_are_as_asked() -> None:
    documents = render(VALUES["two-targets-two-drafts"])
    for kind, pool, replicas in (("Deployment", "router", 4), ("StatefulSet", "target", 2), ("Deployment", "draft", 2)):
        assert find(documents, kind, f"demo-{pool}")["spec"]["replicas"] == replicas
        assert find(documents, "PodDisruptionBudget", f"demo-{pool}")["spec"]["maxUnavailable"] == "50%"


def test_monitors_have_the_labels_that_prometheus_selects() -> None:
    monitors = [document for document in render(VALUES["monitoring"]) if document["kind"] == "PodMonitor"]
    assert {monitor["metadata"]["name"] for monitor in monitors} == {"demo-router", "demo-target", "demo-draft"}
    for monitor in monitors:
        assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_a_secured_sidecar_is_reached_inside_its_pod_alone() -> None:
    documents = render(VALUES["secured-sidecars"])
    config = parse_config(yaml.safe_load(find(documents, "ConfigMap", "demo")["data"]["cluster.yaml"]), ())
    assert config.draft.listen == "127.0.0.1:7001"
    assert config.tls.is_on
    (template,) = pods(find(documents, "StatefulSet", "demo-target"))
    for container in template["spec"]["containers"]:
        assert {"/etc/outrider-secrets/tls", "/etc/outrider-secrets/token"} <= {
            mount["mountPath"] for mount in container["volumeMounts"]
        }
