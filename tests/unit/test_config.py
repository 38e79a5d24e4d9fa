"""Our settings: written once, checked by what is written, and never gone without a sentence."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from recipe_parts.command_line import StrictParser
from recipe_parts.other_names import translate
from transformers import HfArgumentParser, Qwen3Config
from trl import TrlParser

from mcp_grpo import MCPGRPOConfig
from mcp_grpo.build import make_kl_control, make_limits, make_schema_mask, make_vllm_backend, max_concurrent
from mcp_grpo.config import REMOVED, STAGES, is_in_range, own_settings, removed_problems
from mcp_grpo.config_checks import check_arguments, check_without_servers
from mcp_grpo.errors import SettingsError


NAMES = [one.name for one in own_settings()]
# Something that a setting may be, and is not by default.
OTHERS: dict[str, Any] = {
    "call_format": "json",
    "max_turn_tokens": 5,
    "old_results": "drop",
    "max_concurrent_trajectories": 5,
    "max_staleness": 1,
    "weight_sync": "merge",
    "vllm_engine_kwargs": {"enforce_eager": True},
    "vllm_server_urls": ["http://localhost:8000"],
    "cassette": "calls.jsonl",
    "task_choice": "spread",
    "dynamic_sampling": 1,
    "replay_solutions": True,
    "schema_mask": "syntax",
    "constrained_decoding": True,
    "bootstrap_steps": 5,
    "bootstrap_imitation_coef": 0.5,
    "bootstrap_entropy_coef": 0.5,
    "old_logps": "trainer",
    "ratio_gate": 3.0,
    "on_unhealthy": "warn",
    "keep_best": False,
    "record_trajectories": False,
}


def config(**settings: Any) -> MCPGRPOConfig:
    return MCPGRPOConfig("out", use_cpu=True, bf16=False, report_to="none", **settings)


def said_of(**settings: Any) -> str:
    """What is said of settings that are refused."""
    with pytest.raises(SettingsError) as caught:
        config(**settings)
    return str(caught.value)


def needing(what: str) -> list[str]:
    return [one.name for one in own_settings() if what in one.metadata.get("needs", ())]


# ---- What is written ----


def test_there_are_at_most_forty() -> None:
    assert len(NAMES) <= 40


@pytest.mark.parametrize("one", own_settings(), ids=lambda one: one.name)
def test_each_is_documented_in_its_field_and_from_there_everywhere(one: Any) -> None:
    text = one.metadata["help"]
    assert text.endswith(".")
    assert "%" not in text  # argparse would take it for a format
    assert {*one.metadata} <= {"help", "stage", "choices", "range", "needs"}
    written = MCPGRPOConfig.__doc__ or ""
    entry = re.search(rf"\n        {one.name} \(.*\n.*", written)
    assert entry
    assert text in entry[0]
    assert f"`{one.default!r}`" in entry[0]
    assert all(f"`{choice!r}`" in entry[0] for choice in one.metadata.get("choices", ()))
    assert one.metadata.get("range", "") in entry[0]


def test_they_are_in_the_order_of_the_stages() -> None:
    stages = [one.metadata["stage"] for one in own_settings()]
    assert list(dict.fromkeys(stages)) == list(STAGES)
    assert stages == sorted(stages, key=STAGES.index)


def test_every_field_that_is_added_to_trl_s_is_one_of_them() -> None:
    added = set(MCPGRPOConfig.__annotations__) - {"report_to", "_VALID_DICT_FIELDS"}
    assert added == set(NAMES)
    assert set(NAMES) <= inspect.signature(MCPGRPOConfig).parameters.keys()


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_the_parsers_of_transformers_and_trl_read_them(parser: Any) -> None:
    flags = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    flags += ["--ratio_gate", "3", "--schema_mask", "syntax", "--kl_target", "0.2", "--vllm_server_urls", "a", "b"]
    (args,) = parser(MCPGRPOConfig).parse_args_into_dataclasses(flags)
    assert (args.ratio_gate, args.schema_mask, args.kl_target, args.vllm_server_urls) == (
        3.0,
        "syntax",
        0.2,
        ["a", "b"],
    )


# ---- What is refused ----


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        ("[0, 1]", [0, 0.5, 1], [-1e-9, 1.1]),
        ("(0, 1)", [1e-9, 0.999], [0, 1]),
        ("(0, 1]", [1], [0]),
        (">= 1", [1, 5], [0]),
        (">0", [0.1], [0, -1]),
    ],
)
def test_a_range_means_what_it_says(limits: str, inside: list[float], outside: list[float]) -> None:
    assert all(is_in_range(value, limits) for value in inside)
    assert not any(is_in_range(value, limits) for value in [*outside, float("nan")])


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_turns", 0, "an integer >= 1, got 0. Times the policy may generate in one trajectory."),
        ("max_turns", "3", "an integer >= 1, got '3'"),
        ("max_turns", 2.5, "an integer >= 1, got 2.5"),
        ("max_turns", True, "an integer >= 1, got True"),
        ("max_turns", None, "an integer >= 1, got None"),
        ("max_turn_tokens", 0, "an integer > 0 or `None`, got 0"),
        ("max_result_tokens", 15, "an integer >= 16 or `None`, got 15"),
        ("trajectory_timeout", 0.0, "a number > 0, got 0.0"),
        ("max_concurrent_trajectories", 0, "an integer > 0 or `None`"),
        ("max_failed_fraction", 1.5, "a number in [0, 1], got 1.5"),
        ("max_staleness", -1, "an integer >= 0"),
        ("weight_sync", "fast", "one of `'auto'`, `'merge'`, `'adapter'`, got 'fast'"),
        ("vllm_server_urls", "http://a", "a list of strings or `None`, got 'http://a'"),
        ("cassette_mode", "rewind", "`'replay'`"),
        ("task_choice", "hard", "one of `'uniform'`, `'spread'`, got 'hard'"),
        ("dynamic_sampling", -1, "an integer >= 0, got -1"),
        ("schema_mask", "hard", "one of `'off'`, `'syntax'`, `'grammar'`, got 'hard'"),
        ("schema_mask_min_prob", 1.5, "a number in [0, 1]"),
        ("min_unforced_fraction", 2.0, "a number in [0, 1]"),
        ("constrained_decoding", 1, "`True` or `False`, got 1"),
        ("bootstrap_imitation_coef", -0.1, "a number >= 0, got -0.1"),
        ("advantage_mode", "token", "`'group_turn'`"),
        ("gamma", 1.5, "a number in [0, 1] or `None`, got 1.5"),
        ("old_logps", "guess", "got 'guess'"),
        ("ratio_gate", 1.0, "a number > 1, got 1.0"),
        ("kl_target", 0.0, "a number > 0 or `None`, got 0.0"),
        ("kl_target", float("nan"), "a number > 0 or `None`, got nan"),
        ("ref_sync_steps", 0, "an integer >= 1"),
        ("ref_ema_decay", 1.0, "a number in (0, 1), got 1.0"),
        ("on_unhealthy", "ignore", "`'strict'`"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_may_be(name: str, value: Any, wanted: str) -> None:
    said = said_of(**{name: value})
    assert said.startswith(f"`{name}` must be ")
    assert wanted in said


@pytest.mark.parametrize(
    "settings",
    [
        {"gamma": 1},
        {"gamma": 0.0},
        {"gamma": None},
        {"kl_target": None},
        {"max_result_tokens": 16},
        {"vllm_engine_kwargs": "{}"},
    ],
    ids=str,
)
def test_a_value_at_a_limit_is_taken(settings: dict[str, Any]) -> None:
    config(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"advantage_mode": "gae", "multi_objective_aggregation": "normalize_then_sum"}, ["sum_then_normalize"]),
        ({"advantage_mode": "gae", "fp16": True}, ["`fp16` scales", "`bf16`"]),
        ({"truncation": "bootstrap"}, ["needs a value head", "'auto'"]),
        ({"ref_sync": "ema"}, ["`beta` is 0", "0.05"]),
        ({"ref_sync": "ema", "beta": 0.1, "sync_ref_model": True}, ["`sync_ref_model`"]),
        ({"bootstrap_steps": 5, "use_adaptive_entropy": True}, ["`use_adaptive_entropy`"]),
        (
            {"constrained_decoding": True, "schema_mask": "syntax"},
            ["does not go with `schema_mask='syntax'`", '"off"'],
        ),
        (
            {"constrained_decoding": True, "importance_sampling_level": "sequence"},
            ['`importance_sampling_level="token"`', "'sequence'"],
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    said = said_of(**settings)
    assert all(word in said for word in words)


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert len(said_of(max_turns=0, gamma=2.0, ref_sync="soft").splitlines()) == 3
    assert len(said_of(truncation="bootstrap", ref_sync="ema").splitlines()) == 2


# ---- What would do nothing ----


def test_it_is_known_of_each_that_needs_something_what_else_it_may_be() -> None:
    assert set(OTHERS) == set(needing("servers"))


@pytest.mark.parametrize("name", needing("servers"))
def test_what_does_nothing_without_servers_is_refused_there(name: str) -> None:
    check_without_servers(config())
    with pytest.raises(SettingsError, match=f"`{name}=.*there are none. Pass `servers`, or leave it at"):
        check_without_servers(config(**{name: OTHERS[name]}))


def test_leaving_out_what_was_cut_needs_servers() -> None:
    with pytest.raises(SettingsError, match=r"truncation='mask'.*there are none. Pass `servers`.*mask_truncated"):
        check_without_servers(config(truncation="mask"))


@pytest.mark.parametrize("name", needing("vllm"))
def test_what_does_nothing_without_vllm_is_refused_there(name: str) -> None:
    with pytest.raises(SettingsError, match=f"`{name}=.*is for sampling with vLLM. Set `use_vllm=True`"):
        check_arguments(config(**{name: OTHERS[name]}), None, {})


def test_groups_can_only_be_passed_over_where_a_process_has_whole_ones() -> None:
    args = config(use_vllm=True, vllm_mode="server", max_staleness=2, per_device_train_batch_size=8)
    check_arguments(args, None, {})
    args.per_device_train_batch_size = 4  # as where two processes share a group
    with pytest.raises(
        SettingsError, match=r"needs whole groups on each process, but a batch has 4 trajectories there"
    ):
        check_arguments(args, None, {})
    args.max_staleness = 1
    check_arguments(args, None, {})


def test_groups_can_only_be_passed_over_where_tasks_can_be_looked_up() -> None:
    args = config(use_vllm=True, vllm_mode="server", max_staleness=2)
    stream = Dataset.from_list([{"task_id": str(i), "prompt": "2+3?"} for i in range(8)]).to_iterable_dataset()
    with pytest.raises(SettingsError, match="the dataset must be a `Dataset`, not a stream"):
        check_arguments(args, stream, {})


def test_all_that_does_not_go_with_servers_is_said_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        check_arguments(config(top_p=0.5, max_staleness=1, temperature=0.0), Dataset.from_list([]), {"tools": [print]})
    assert len(str(caught.value).splitlines()) == 5


# ---- What was removed ----


@pytest.mark.parametrize("name", [name for name in REMOVED if "=" not in name])
def test_a_removed_setting_is_refused_with_what_to_write_now(name: str) -> None:
    assert name not in MCPGRPOConfig.__dataclass_fields__
    assert f"`{name}` is no longer a setting, so delete it: " in said_of(**{name: 0.123})


def test_what_is_advised_instead_is_there() -> None:
    named = {word for removed in REMOVED.values() for word in re.findall(r"`([a-z_]+)[`=]", removed.instead)}
    assert named
    assert not named - {*MCPGRPOConfig.__dataclass_fields__}


def test_what_was_written_at_its_default_can_be_deleted() -> None:
    said = said_of(trim_padding=True, ratio_gate_min=0.25, first_phase_temperature=None, health_patience=7)
    sentence, deletion = said.splitlines()
    assert "`health_patience` is no longer a setting, so delete it: a sign counts after 5 batches" in sentence
    assert "Delete `trim_padding: True`, `ratio_gate_min: 0.25`, `first_phase_temperature: None`" in deletion


def test_a_removed_choice_is_refused_with_what_to_write_now() -> None:
    wanted = (
        '`schema_mask: sampler` is no longer a choice: leave `schema_mask` at "off"; `constrained_decoding` by itself'
    )
    assert wanted in said_of(schema_mask="sampler", constrained_decoding=True)


def test_other_names_are_no_business_of_it() -> None:
    assert removed_problems({"max_turns": 3, "schema_mask": "off", "gibberish": 1}) == []
    with pytest.raises(TypeError, match="gibberish"):
        config(gibberish=1)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (
            ["--first_phase_steps", "3"],
            "`first_phase_steps` is no longer a setting, so delete it: a run samples in one way",
        ),
        (["--first-phase-steps=3"], "`first_phase_steps` is no longer a setting"),
        (["--no_trim_padding"], "`trim_padding` is no longer a setting, so delete it: padding"),
        (["--trim_padding"], "Delete `trim_padding: true`"),
        (["--ratio_gate_max", "4.0"], "Delete `ratio_gate_max: 4.0`"),
        (["--ratio_gate_max", "8"], "`ratio_gate`, one number above 1"),
        (["--schema_mask", "sampler"], "`schema_mask: sampler` is no longer a choice"),
        (["--straggler_policy", "cut", "--gibberish", "1"], "no setting `gibberish`.*every trajectory is waited for"),
    ],
)
def test_a_flag_that_was_removed_is_refused_with_what_to_write_now(flags: list[str], wanted: str) -> None:
    with pytest.raises(SettingsError, match=wanted):
        StrictParser([MCPGRPOConfig]).parse(["--output_dir", "out", "--use_cpu", "true", *flags])


def test_a_file_with_removed_settings_is_refused_with_what_to_write_now(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(
        "output_dir: out\nuse_cpu: true\nratio_gate_min: 0.25\nkl_on_forced: true\n"
        "value_head: mlp\nschema_mask: sampler\n"
    )
    with pytest.raises(SettingsError) as caught:
        StrictParser([MCPGRPOConfig]).parse(["--config", str(tmp_path / "old.yaml")])
    said = str(caught.value)
    assert "Delete `ratio_gate_min: 0.25`, `kl_on_forced: True`" in said
    assert "`value_head` is no longer a setting, so delete it: there is a linear value head exactly where" in said
    assert "`schema_mask: sampler` is no longer a choice" in said


@pytest.mark.parametrize("section", [{"rollout": {"batch_timeout": 60}}, {"gate": {"min": 0.1}}], ids=str)
def test_a_removed_setting_in_a_section_is_explained(section: dict[str, Any]) -> None:
    found = translate(section, NAMES, [])
    assert found is not None
    assert "is no longer a setting, so delete it: " in found.problems[0]


# ---- What is made of them ----


@pytest.mark.parametrize(
    ("settings", "max_result_tokens"),
    [
        ({"max_completion_length": 400}, 200),
        ({"max_completion_length": 400, "max_result_tokens": 300}, 300),
        ({"max_completion_length": 20}, 16),
        ({"max_completion_length": None}, 512),
    ],
)
def test_a_result_may_take_half_of_the_completion_unless_it_is_said_how_much(
    settings: dict[str, Any], max_result_tokens: int
) -> None:
    limits = make_limits(config(**settings), Qwen3Config(max_position_embeddings=1024))
    assert limits.max_result_tokens == max_result_tokens


def test_a_whole_batch_is_under_way_unless_it_is_said_how_many() -> None:
    assert max_concurrent(config(per_device_train_batch_size=4, gradient_accumulation_steps=2)) == 8
    assert max_concurrent(config(max_concurrent_trajectories=3)) == 3
    ahead = {"use_vllm": True, "max_staleness": 3}
    assert max_concurrent(config(per_device_train_batch_size=4, gradient_accumulation_steps=2, **ahead)) == 16
    assert max_concurrent(config(max_concurrent_trajectories=3, **ahead)) == 3


@pytest.mark.parametrize(("beta", "target", "is_made"), [(0.1, 0.4, True), (0.0, 0.4, False), (0.1, None, False)])
def test_beta_is_raised_only_where_there_is_one_and_a_target(beta: float, target: float | None, is_made: bool) -> None:
    assert (make_kl_control(config(beta=beta, kl_target=target)) is not None) == is_made


def test_there_is_a_vllm_backend_only_with_vllm() -> None:
    assert make_vllm_backend(config()) is None


@pytest.mark.parametrize(
    ("has_gpu", "settings", "expected"),
    [
        (True, {}, True),
        (True, {"use_cpu": True}, False),
        (False, {}, False),
        (False, {"use_cpu": True}, False),
        (False, {"use_cpu": True, "bf16": True}, True),
    ],
)
def test_bf16_is_used_where_a_gpu_has_it_or_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, settings: dict[str, Any], expected: bool
) -> None:
    for module in ("mcp_grpo.config", "transformers.training_args"):
        monkeypatch.setattr(f"{module}.is_torch_bf16_gpu_available", lambda: has_gpu)
    assert MCPGRPOConfig(str(tmp_path), **settings).bf16 is expected


@pytest.mark.parametrize(("fraction", "tokens"), [(0.0, 0), (0.1, 16)])
def test_a_floor_of_nothing_leaves_no_token_in_the_loss_by_itself(
    fraction: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: list[Any] = []
    monkeypatch.setattr("mcp_grpo.build.SchemaMask", lambda roles, rule: rules.append(rule))
    monkeypatch.setattr("mcp_grpo.build.GrammarRoles", lambda grammars: None)
    unused: Any = object()
    make_schema_mask(config(schema_mask="syntax", min_unforced_fraction=fraction), unused, unused)
    assert [rule.min_unforced_tokens for rule in rules] == [tokens]
