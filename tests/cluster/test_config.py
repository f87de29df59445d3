from __future__ import annotations

import re

import pytest

from cluster.config import Config
from cluster.config.file import load_config
from cluster.config.speculation import SpeculationConfig
from cluster.config.workers import READ_STATES
from cluster.errors import ConfigurationError
from services.launch.checks import check_models


def test_no_file_gives_the_defaults():
    assert load_config() == Config()


def test_an_empty_file_gives_the_defaults(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("# nothing\n")
    assert load_config(path) == Config()


def test_a_file_and_overrides_are_merged(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("target:\n  threads: 2\n  block_size: 32\nrouter:\n  port: 9000\n")
    config = load_config(
        path,
        overrides=[
            "target.threads=3",
            "target.cpus=[0, 1]",
            "target.addresses=[localhost:5000, '[::1]:5001']",
            "speculation.num_speculative_tokens=6",
            "draft.model=a=b",
        ],
    )
    assert config.target.threads == 3
    assert config.target.block_size == 32
    assert config.target.cpus == (0, 1)
    assert config.target.listen_address == "localhost:5000"
    assert config.speculation.num_speculative_tokens == 6
    assert config.router.port == 9000
    assert config.draft.model == "a=b"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("target.thread=2", ["unknown key 'target.thread'", "'threads'"]),
        ("speculation.num_speculativ_tokens=2", ["'num_speculative_tokens'"]),
        ("routr.port=1", ["unknown key 'routr'", "'router'"]),
        ("router.zzz=1", ["unknown key 'router.zzz'", "known keys: host, port"]),
        ("target.threads=0", ["target.threads", "greater than 0", "0"]),
        ("target.kv_cache_bytes=auto", ["target.kv_cache_bytes", "'auto'"]),
        ("draft.memory_utilization=1.1", ["draft.memory_utilization", "less than or equal to 1"]),
        ("target.threads=many", ["target.threads", "'many'"]),
        ("target.dtype=float8", ["target.dtype", "'float8'"]),
        ("target.addresses=[nowhere]", ["target.addresses.0", "'nowhere'"]),
        ("router.port=70000", ["router.port", "65535"]),
        ("target.engine=tensorrt", ["target.engine", "'simulated'"]),
        ("simulation.aceptance=0.5", ["unknown key 'simulation.aceptance'", "'acceptance'"]),
        ("simulation.acceptance=1.5", ["simulation.acceptance", "less than or equal to 1"]),
        ("simulation.target_step_ms=[[4, 1], [1, 2]]", ["simulation.target_step_ms", "must ascend"]),
        ("simulation.draft_step_ms=[]", ["simulation.draft_step_ms", "at least 1"]),
        ("simulation.round_trip_ms=-1", ["simulation.round_trip_ms", "greater than or equal to 0"]),
        ("draft.replicas=-1", ["draft.replicas", "-1"]),
        ("speculation.num_speculative_tokens=65", ["speculation.num_speculative_tokens", "64"]),
        ("speculation.num_speculative_tokens=17", ["speculation", "raise the latter"]),
        ("speculation.draft_timeout_ms=0", ["speculation.draft_timeout_ms"]),
        ("speculation.draft_timeout_ms=.nan", ["speculation.draft_timeout_ms"]),
        ("target.threads", ["write section.key=value"]),
        ("threads=2", ["write section.key=value"]),
        (".threads=2", ["write section.key=value"]),
        ("target.=2", ["write section.key=value"]),
        ("target.cpus=[1", ["target.cpus=[1", "not YAML"]),
    ],
)
def test_a_bad_setting_names_the_key_and_what_to_do(override, said):
    with pytest.raises(ConfigurationError) as caught:
        load_config(overrides=[override])
    assert all(part in caught.value.message for part in said), caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("target: [1", "not YAML"),
        ("- target", "must be a mapping"),
        ("target: 5", "target"),
        ("nonsense: {}", "known keys: target, draft, speculation, router"),
        ("router: {cache_salt: key}", "set router.api_keys_file"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, said):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        load_config(path)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["speculation.controller=fixed"], "set controller goodput"),
        (["draft.placement=in-process", "draft.in_process_threads=device"], "in_process_threads to auto"),
        (["target.engine=vllm", "draft.placement=in-process"], "placement to sidecar"),
        (["target.engine=vllm", "draft.drafter=engine"], "another draft.drafter"),
    ],
)
def test_a_limit_is_refused_where_no_controller_keeps_it(overrides, said):
    with pytest.raises(ConfigurationError, match=f"output_token_ms 40 .*{said}"):
        load_config(None, ["speculation.output_token_ms=40", *overrides])
    load_config(None, ["speculation.output_token_ms=40", *overrides, "speculation.num_speculative_tokens=0"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("speculation.tree_width=2", "chains only"),
        ("speculation.suffix_bytes=1", "the draft's distribution"),
        ("target.engine=simulated", "target.engine torch"),
        ("draft.drafter=ngram", "the draft's probabilities"),
        ("draft.drafter=vllm", "the draft's probabilities"),
    ],
)
def test_rejection_is_refused_where_it_cannot_be(override, said):
    with pytest.raises(ConfigurationError, match=said):
        load_config(overrides=["speculation.acceptance=rejection", override])


def test_a_drafter_that_cannot_be_is_refused():
    with pytest.raises(ConfigurationError, match=r"target\.engine simulated, not torch"):
        load_config(None, ["draft.placement=in-process", "draft.drafter=simulated"])


def test_without_run_ahead_there_are_no_branches():
    assert SpeculationConfig().num_run_ahead_branches == 3
    assert SpeculationConfig(max_run_ahead=0).num_run_ahead_branches == 0


def test_retired_settings_have_no_effect_but_a_warning(caplog):
    retired = [
        "draft.ngram_min=2",
        "draft.drafter=layer-skip",
        "speculation.controller=threshold",
        "ray.router={num_gpus: 0}",
    ]
    assert load_config(None, retired) == load_config(None, ["draft.drafter=ngram"])
    assert [message.split(":")[0] for message in caplog.messages] == [
        "draft.ngram_min is ignored and will be refused by the next version",
        "ray.router.num_gpus is ignored and will be refused by the next version",
        "draft.drafter layer-skip is replaced by ngram and will be refused by the next version",
        "speculation.controller threshold is replaced by goodput and will be refused by the next version",
    ]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_draft_on_the_hosts_processors_is_a_sidecar_on_the_cpu(device):
    config = load_config(None, ["draft.placement=host-cpu", f"draft.device={device}", "target.device=cuda"])
    assert config.draft.device == "cpu"
    assert config.has_sidecars
    assert config.drafts_on_host_cpu
    assert Config.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["draft.device=cuda"], "contradicts draft.device cuda: leave draft.device out"),
        (["draft.drafter=vllm"], "cannot use draft.drafter vllm.*: set draft.drafter to model"),
        (
            ["target.cpus=[0,1,2]", "draft.cpus=[2,1,7]"],
            r"\[1, 2\] are in both target.cpus and draft.cpus: leave draft.cpus out",
        ),
    ],
)
def test_a_draft_that_cannot_be_on_the_hosts_processors_is_refused(overrides, said):
    with pytest.raises(ConfigurationError, match=said):
        load_config(None, ["draft.placement=host-cpu", *overrides])


def test_without_speculation_the_placement_of_drafts_does_not_matter():
    settings = ["draft.placement=host-cpu", "draft.device=cuda", "speculation.num_speculative_tokens=0"]
    assert not load_config(None, settings).drafts_on_host_cpu


def test_rejection_knows_what_the_draft_sampled_from():
    assert SpeculationConfig().tunes_draft_temperature
    assert not SpeculationConfig(acceptance="rejection").tunes_draft_temperature


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_an_override_of_what_is_no_section_is_refused(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("target: 5")
    with pytest.raises(ConfigurationError, match="not a section"):
        load_config(path, ["target.threads=1"])


def test_an_automatic_kv_cache():
    config = load_config(overrides=["target.kv_cache_bytes=null", "target.memory_utilization=0.5"])
    assert (config.target.kv_cache_bytes, config.target.memory_utilization) == (None, 0.5)
    assert config.draft.kv_cache_bytes is None


def test_the_tree_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Config().router.port = 1


def test_without_an_address_there_is_nowhere_to_listen():
    with pytest.raises(ConfigurationError, match="address"):
        _ = Config().target.listen_address


@pytest.mark.parametrize(
    ("max_run_ahead", "num_speculative_tokens", "window"), [(None, 4, 10), (None, 0, 2), (6, 4, 6), (3, 5, 5)]
)
def test_window(max_run_ahead, num_speculative_tokens, window):
    speculation = SpeculationConfig(max_run_ahead=max_run_ahead)
    assert speculation.window(num_speculative_tokens) == window


def test_the_environment_goes_before_the_file_and_overrides_before_both(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("router: {port: 1, host: a, max_waiting_requests: 1}\ntarget:\n  # nothing\n")
    environment = {
        "OUTRIDER_ROUTER__PORT": "2",
        "OUTRIDER_ROUTER__HOST": "b",
        "OUTRIDER_TARGET__CPUS": "[0, 1]",
        "OUTRIDER_TARGET__ADDRESSES": "['a:1', 'dns:b:2']",
        "OUTRIDER_TARGET__ENGINE_ARGS": "{}",
        "OUTRIDER_RAY__DRAFT__MAX_REPLICAS": "8",
        "OUTRIDER_TARGET__KV_CACHE_BYTES": "null",
        "OUTRIDER_API_KEY": "no setting",
        "OUTRIDER_ROUTER_PORT": "tcp://10.0.0.1:80",  # Kubernetes' own, of a service called outrider-router
    }
    config = load_config(path, ["router.host=c"], environment)
    assert (config.router.port, config.router.host, config.router.max_waiting_requests) == (2, "c", 1)
    assert config.target.cpus == (0, 1)
    assert config.target.addresses == ("a:1", "dns:b:2")
    assert config.target.kv_cache_bytes is None
    assert config.ray.draft.max_replicas == 8


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OUTRIDER_ROUTER__PROT", "1", "OUTRIDER_ROUTER__PROT: .*did you mean 'OUTRIDER_ROUTER__PORT'"),
        ("OUTRIDER_ROUTR__PORT", "1", "did you mean 'OUTRIDER_ROUTER__PORT'"),
        ("OUTRIDER_RAY__DRAFT__MAX_REPLICA", "1", "did you mean 'OUTRIDER_RAY__DRAFT__MAX_REPLICAS'"),
        ("OUTRIDER_RAY__FURTHER_DRAFTS__A__BOGUS", "1", "unknown key 'ray.further_drafts.a.bogus'; known keys"),
        ("OUTRIDER_ROUTER__PORT", "many", "OUTRIDER_ROUTER__PORT: router.port: .*'many'"),
        ("OUTRIDER_TARGET__CPUS", "[0, x]", "OUTRIDER_TARGET__CPUS: target.cpus.1"),
        ("OUTRIDER_TARGET__CPUS", "[0", "OUTRIDER_TARGET__CPUS.*not YAML"),
        ("OUTRIDER_TARGET__", "0", "OUTRIDER_TARGET__"),
    ],
)
def test_a_bad_variable_is_named(name, value, said):
    with pytest.raises(ConfigurationError, match=said):
        load_config(environment={name: value})


def test_settings_that_do_not_go_together_are_not_all_printed():
    with pytest.raises(ConfigurationError) as caught:
        load_config(overrides=["ray.scaling.mode=act"])
    assert "ray.target.max_replicas" in caught.value.message
    assert len(caught.value.message) < 200


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="is not YAML"):
        load_config(path)


def test_a_default_draft_that_does_not_fit_says_so_and_how_to_serve_without_it() -> None:
    unnamed = load_config(None, ["target.model=mine"]).tokenizer_mismatch(10)
    assert unnamed.startswith("the default draft 'outrider-draft-2m' cannot draft for the target 'mine'")
    assert "has none of the 10 tokens" in unnamed
    remedies = re.findall(r"--([\w.]+) (\w+)", unnamed)
    assert remedies == [("draft.drafter", "ngram"), ("speculation.num_speculative_tokens", "0")]
    for key, value in remedies:
        without = load_config(None, [f"{key}={value}"])
        assert without.draft_model == without.target.model or not without.has_drafter
    named = load_config(None, ["target.model=mine", "draft.model=yours"]).tokenizer_mismatch(10)
    assert named.startswith("the draft 'yours' ")
    assert named.endswith(": choose a draft with the target's tokenizer, or one with many of its tokens")


def test_vllm_needs_a_draft_with_the_targets_ids() -> None:
    config = load_config(None, ["draft.drafter=vllm", "draft.model=outrider-draft-smollm2-135m"])
    with pytest.raises(ConfigurationError, match=r"it has 5 of 4096: use draft\.drafter model"):
        check_models(config)
    check_models(load_config(None, ["draft.drafter=model", "draft.model=outrider-draft-smollm2-135m"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["draft.drafter=ngram"], "draft.drafter ngram reads all tokens"),
        (["draft.drafter=eagle"], "draft.drafter eagle reads all tokens"),
        (["draft.drafter=vllm"], "vLLM's draft reads all tokens"),
        (["target.engine=vllm", "draft.placement=in-process"], "vLLM's draft reads all tokens"),
        (["speculation.acceptance=rejection"], "acceptance rejection .* from all tokens"),
        (["draft.placement=in-process", "draft.in_process_threads=device"], "with in_process_threads device"),
    ],
)
def test_drafters_that_read_all_tokens_take_no_context_tokens(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_config(None, ["draft.context_tokens=256", *settings])
    load_config(None, ["draft.context_tokens=256", "speculation.num_speculative_tokens=0", *settings[:1]])
    assert load_config(None, settings).context_tokens is None
    assert load_config(None, ["draft.context_tokens=auto", *settings]).context_tokens is None


@pytest.mark.parametrize("drafter", ["model", "self-int4", "simulated"])
def test_other_drafters_find_how_many_tokens_to_read(drafter: str) -> None:
    settings = [f"draft.drafter={drafter}", f"target.engine={'simulated' if drafter == 'simulated' else 'torch'}"]
    assert load_config(None, settings).context_tokens == "auto"
    assert load_config(None, [*settings, "draft.context_tokens=null"]).context_tokens is None


@pytest.mark.parametrize("drafter", READ_STATES)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["draft.placement=pool"], "reads the target's hidden states: leave draft.placement out, .* not pool"),
        (["draft.placement=sidecar"], "reads the target's hidden states: leave draft.placement out, .* not sidecar"),
        (["draft.in_process_threads=own"], "drafts in the target's thread: leave draft.in_process_threads out"),
        (["target.engine=vllm"], "needs target.engine torch, not vllm: .*speculative_config {method: "),
        (["speculation.acceptance=rejection"], "which draft.drafter {drafter} does not support"),
    ],
)
def test_heads_draft_only_in_the_thread_of_a_target_of_ours(drafter: str, settings: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("{drafter}", drafter)):
        load_config(None, [f"draft.drafter={drafter}", *settings])
    config = load_config(None, [f"draft.drafter={drafter}"])
    assert config.drafts_in_process
    assert not config.has_draft_workers


@pytest.mark.parametrize(
    ("drafter", "said"),
    [("eagle", "has no EAGLE head"), ("medusa", "has no Medusa heads"), ("mtp", "has no MTP module")],
)
def test_heads_are_checked_before_programs_start(drafter: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_models(load_config(None, [f"draft.drafter={drafter}"]))
    check_models(load_config(None, [f"draft.drafter={drafter}", "speculation.num_speculative_tokens=0"]))


def test_a_head_that_fits_passes_the_check() -> None:
    check_models(load_config(None, ["draft.drafter=eagle", "draft.model=outrider-eagle-12m"]))
