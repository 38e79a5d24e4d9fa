"""What is saved and pushed is the policy as it was trained, with a card that says how, and nothing else."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from helpers.hub import LocalHub, local_hub
from helpers.runs import make_trainer
from helpers.sums import TEMPLATE_KWARGS
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from servers.push import ARGUMENTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcp_grpo import MCPGRPOTrainer, load_adapter
from mcp_grpo.errors import PublishingError, SettingsError
from mcp_grpo.publishing import PrivateValues, card, hub_name, publishable_copy, rewrite_card, run_command


TESTS = Path(__file__).parents[2]
CANARIES = {
    "CANARY_SUMS_KEY": "canary-of-a-server-1701",
    "CANARY_TOKEN": "hf_canaryofthehub1702",
    "CANARY_API_KEY": "canary-of-the-environment-1703",
    "CANARY_NOTE": "canary-of-a-stray-file-1704",
    "CANARY_GITHUB_PAT": "canary-of-a-pat-1706",
    "CANARY_JWT": "canary-of-a-jwt-1707",
    "CANARY_SLACK_WEBHOOK": "https://hooks.example.com/services/T17/B08/canaryOfTheHook1708",
    "CANARY_PIN_CODE": "c17x9",
    "CANARY_DATABASE": "mysql://ann:canary-of-a-database-1710@h/d",
}
PARTS = ("canaryOfTheHook1708", "canary-of-a-database-1710")  # which may be shown without the rest
POLICY = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json", "README.md"}


@dataclass
class Push:
    """A run that pushed: the Hub it pushed to, its output folder and its base model."""

    hub: LocalHub
    folder: Path
    model: str
    output: str

    @property
    def files(self) -> dict[str, bytes]:
        return self.hub.repositories["somebody/sums"]


def run_push(hub: LocalHub, folder: Path, model: str) -> Push:
    folder.mkdir()
    environment = {
        **os.environ,
        **CANARIES,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder / "hf"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    # An absolute script and folder, as a scheduler would call it.
    command = [sys.executable, str(TESTS / "servers" / "push.py"), model, str(folder)]
    done = subprocess.run(
        [*command, "--api-key", "canary-of-the-command-1705"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Push(hub, folder, model, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def push(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> Any:
    with local_hub() as hub:
        yield run_push(hub, tmp_path_factory.mktemp("push") / "sums", adding_model)


@pytest.mark.full
def test_the_policy_its_template_and_its_card_are_pushed_and_so_is_the_last_checkpoint(push: Push) -> None:
    assert POLICY | {"curves.png", "mcp_grpo.json"} <= push.files.keys()
    assert {
        f"last-checkpoint/{name}" for name in ("adapter_model.safetensors", "optimizer.pt", "trainer_state.json")
    } <= (push.files.keys())
    assert any("step 1" in commit for commit in push.hub.commits)
    assert push.hub.commits[-1] == "End of training"
    assert push.hub.tokens == {f"Bearer {CANARIES['CANARY_TOKEN']}"}


@pytest.mark.full
def test_nothing_private_is_pushed(push: Push) -> None:
    recorded = (push.folder / "calls.jsonl").read_text().splitlines()
    assert len(recorded) > 2
    private = [*CANARIES.values(), "canary-of-the-command-1705", str(push.folder), push.model, str(TESTS), os.getcwd()]
    private += [line[:60] for line in recorded]
    for name, content in push.files.items():
        for value in private:
            assert value.encode() not in content, f"{name} holds {value}"
    names = {Path(name).name for name in push.files}
    assert not names & {
        "training_args.bin",
        "calls.jsonl",
        "notes.txt",
        "reference.safetensors",
        "value_head.safetensors",
    }
    assert not any("ref" in Path(name).parts or name.endswith(".parquet") for name in push.files)


@pytest.mark.full
def test_no_secret_is_in_any_file_upload_or_log_or_on_the_screen(push: Push) -> None:
    # Every kind of secret, each of which a server puts into the description of its tool and into its error output.
    mine = {
        CANARIES[name] for name in ("CANARY_NOTE", "CANARY_TOKEN")
    }  # a file of the user's, and what he logs in with
    secrets = [value.encode() for value in (*CANARIES.values(), *PARTS, *ARGUMENTS) if value not in mine]
    local = {str(path): path.read_bytes() for path in push.folder.rglob("*") if path.is_file()}
    places = local | push.files | {"the screen": push.output.encode()}
    assert {Path(name).suffix for name in local} >= {".jsonl", ".json", ".md", ".parquet", ".safetensors"}
    assert b"Tell all: " in local[str(push.folder / "calls.jsonl")]
    assert b"***" in push.files["mcp_grpo.json"]
    assert [(name, value) for name, content in places.items() for value in secrets if value in content] == []


@pytest.mark.skipif(find_spec("trackio") is None, reason="needs the extra `tracking`")
@pytest.mark.full
def test_figures_and_tables_in_trackio_stay_on_this_machine(push: Push) -> None:
    # `trackio.sync` fails in that process: a push that called it would not have got here.
    assert (push.folder / "trackio" / "sums.db").is_file()
    assert push.hub.repositories.keys() == {"somebody/sums"}
    assert b"trackio" not in push.files["README.md"]


@pytest.mark.full
def test_the_output_folder_keeps_what_was_not_pushed(push: Push) -> None:
    names = {file.name for file in push.folder.iterdir()}
    assert {"calls.jsonl", "notes.txt", "value_head.safetensors", "completions"} <= names
    assert not any(name.startswith("_upload") for name in names)
    base = json.loads((push.folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == push.model  # or it could not be loaded where it was trained


@pytest.mark.full
def test_every_pushed_tokenizer_has_the_template_of_training(push: Push) -> None:
    saved = (push.folder / "chat_template.jinja").read_bytes()
    stock = AutoTokenizer.from_pretrained(push.model).chat_template
    assert saved.decode() != stock
    assert push.files["chat_template.jinja"] == push.files["last-checkpoint/chat_template.jinja"] == saved


@pytest.mark.full
def test_the_card_says_what_the_policy_was_trained_on_and_with_what_outcome(push: Push) -> None:
    card = push.files["README.md"].decode()
    facts = json.loads(push.files["mcp_grpo.json"])
    assert "| `add` | sums | Add. | `" in card
    assert f"catalog `{facts['catalog_hash'][:16]}`" in card
    assert "| success, with 95 % interval | " in card
    assert "tasks (95 % interval" in card.replace("\\", "")
    assert "![Metrics over the training steps](curves.png)" in card
    assert "4 tasks." in card
    assert "By family: addition (4)." in card
    assert "somebody/sums-tasks" in card
    assert "for 2 steps" in card
    model = Path(push.model).name
    assert f"python push.py {model} sums --api-key '***'" in card
    assert 'load_adapter("somebody/sums", base="<the base model>")' in card
    assert facts["chat_template_kwargs"] == TEMPLATE_KWARGS
    assert [tool["function"]["name"] for tool in facts["tools"]] == ["add", "tell"]


@pytest.mark.full
def test_a_pushed_adapter_is_loaded_from_the_hub(push: Push, tmp_path: Path) -> None:
    script = (
        "import sys; from mcp_grpo import load_adapter; "
        "model, tokenizer = load_adapter('somebody/sums', base=sys.argv[1]); "
        "print(model.active_adapter, len(tokenizer.chat_template))"
    )
    environment = {**os.environ, "HF_ENDPOINT": push.hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script, push.model],
        env={**environment, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["default", str(len(push.files["chat_template.jinja"].decode()))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> MCPGRPOTrainer:
    """A policy with a value head, and where it was saved (`args.output_dir`)."""
    folder = tmp_path_factory.mktemp("trained")
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    # Few tokens: with such an adapter it does not know when to end.
    few = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 40}
    with make_trainer(folder, adding_model, peft_config=lora, advantage_mode="hybrid", **few) as trainer:
        trainer.train()
        trainer.save_model()
        trainer.save_model(str(folder / "elsewhere"))
    return trainer


def test_a_saved_adapter_is_loaded_by_us_and_by_plain_peft_with_the_same_logits(
    trained: MCPGRPOTrainer, adding_model: str
) -> None:
    folder = Path(str(trained.args.output_dir))
    ids = torch.tensor([[1, 2, 3, 4]])
    model, tokenizer = load_adapter(folder)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(adding_model), str(folder))
    auto = AutoPeftModelForCausalLM.from_pretrained(str(folder))
    with torch.no_grad():
        expected = trained.model.eval()(ids).logits
        for loaded in (model, plain, auto):
            torch.testing.assert_close(loaded(ids).logits, expected)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(adding_model)(ids).logits, expected)
    assert tokenizer.chat_template == trained._collector.renderer.chat_template
    assert not hasattr(model.base_model.model, "value_head")


def test_the_value_head_is_loaded_if_asked_for(trained: MCPGRPOTrainer) -> None:
    model, tokenizer = load_adapter(str(trained.args.output_dir), value_head=True)
    ids = tokenizer("2+3?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids, fused_lm_head=True, num_values=ids.size(1))
    assert output.value_preds.shape == ids.shape


def test_what_is_saved_has_a_card_and_curves_wherever_it_is_saved(trained: MCPGRPOTrainer) -> None:
    folder = Path(str(trained.args.output_dir))
    for each in (folder, folder / "elsewhere"):
        assert {*POLICY, "curves.png", "mcp_grpo.json"} <= {file.name for file in each.iterdir()}
        assert str(folder) not in (each / "README.md").read_text()


def test_a_checkout_that_was_never_installed_writes_a_card_without_its_version(
    trained: MCPGRPOTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if name == "mcp-grpo":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(card, "version", installed)
    path = tmp_path / "README.md"
    path.write_text("---\nlibrary_name: peft\n---\n")
    rewrite_card(path, trained.catalog, model_name="sums", model_id="somebody/sums", is_adapter=True)
    written = path.read_text()
    assert f"trl: {version('trl')}" in written
    assert f"mcp-grpo: {version('mcp-grpo')}" not in written


def test_an_adapter_that_does_not_name_its_base_asks_for_it(trained: MCPGRPOTrainer, tmp_path: Path) -> None:
    publishable_copy(Path(str(trained.args.output_dir)), tmp_path, private=PrivateValues.of([], []))
    with pytest.raises(SettingsError, match="Pass `base`"):
        load_adapter(tmp_path)


def test_the_value_head_is_not_copied(trained: MCPGRPOTrainer, tmp_path: Path) -> None:
    folder = Path(str(trained.args.output_dir))
    publishable_copy(folder, tmp_path / "copy", private=PrivateValues.of([], []))
    assert (folder / "value_head.safetensors").exists()
    assert not (tmp_path / "copy" / "value_head.safetensors").exists()


def test_a_secret_in_a_file_that_cannot_be_cleaned_stops_the_upload_without_being_named(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "adapter_model.safetensors").write_bytes(b"\0weights a-real-secret\0")
    with pytest.raises(PublishingError, match=r"adapter_model.safetensors was not uploaded") as raised:
        publishable_copy(tmp_path / "from", tmp_path / "to", private=PrivateValues.of(["a-real-secret"], []))
    assert "a-real-secret" not in str(raised.value)


def test_a_home_of_one_word_is_hidden_but_not_the_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.chdir(tmp_path)
    private = PrivateValues.of([], ["/"])
    assert private.hide("see /root/.cache/x and /srv/y") == "see .../.cache/x and /srv/y"
    assert private.hide("an API with /rooted, /root.") == "an API with /rooted, /root."
    (tmp_path / "weights").write_bytes(b"\0/root/notes\0")
    assert private.are_in(tmp_path / "weights")


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/home/ann/.cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de/", "Qwen/Qwen3-0.6B"),
        ("/data/models/mine", None),
        ("./mine", None),
        (None, None),
    ],
)
def test_a_base_model_is_named_as_the_hub_names_it_or_not_at_all(base: str | None, name: str | None) -> None:
    assert hub_name(base) == name


@pytest.mark.parametrize(
    ("argv", "environ", "command"),
    [
        (["recipes/a.py", "--config", "recipes/b.yaml"], {}, "python recipes/a.py --config recipes/b.yaml"),
        (["/home/ann/a.py", "--out=/home/ann/x", "--hub_token", "hf_1"], {}, "python a.py --out=x --hub_token '***'"),
        (["a.py"], {"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate launch a.py"),
        (["a.py"], {"WORLD_SIZE": "8"}, "accelerate launch --num_processes 8 a.py"),
        (
            ["a.py"],
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "ACCELERATE_MIXED_PRECISION": "bf16"},
            "accelerate launch --num_machines 2 --num_processes 16 --mixed_precision bf16 a.py",
        ),
        (
            ["a.py", "--max_result_tokens", "512", "--hub_private_repo=true", "--eos_token", "<|im_end|>"],
            {},
            "python a.py --max_result_tokens 512 --hub_private_repo=true --eos_token '<|im_end|>'",
        ),
        (["a.py", "--password", "12345678", "--tokens=a,b"], {}, "python a.py --password '***' '--tokens=***'"),
        (["/usr/bin/mcp-grpo", "train", "../mine.yaml"], {}, "mcp-grpo train mine.yaml"),
        (["/x/ipykernel_launcher.py", "-f", "/x/kernel.json"], {}, None),
        (["-c"], {}, None),
    ],
)
def test_the_command_is_shown_without_secrets_and_folders(argv: list[str], environ: dict, command: str | None) -> None:
    assert run_command(argv, environ) == command


@pytest.mark.parametrize("name", ["fsdp2", "zero2", "zero3"])
def test_the_command_shares_the_weights_as_the_run_did(name: str) -> None:
    def environment_of(*flags: str) -> dict[str, str]:
        """What `accelerate launch` sets for each process."""
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*flags, "a.py"]))
        args.deepspeed_fields_from_accelerate_config = ""
        prepare = prepare_deepspeed_cmd_env if args.use_deepspeed else prepare_multi_gpu_env
        made = prepare(args)
        return {**(made[1] if args.use_deepspeed else made), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}

    launched = environment_of("--config_file", str(TESTS.parent / "recipes" / "accelerate" / f"{name}.yaml"))
    command = run_command(["a.py"], launched)
    assert command is not None
    again = environment_of(*shlex.split(command)[2:-1])
    differing = {each for each in launched.keys() | again.keys() if launched.get(each) != again.get(each)}
    assert not {each for each in differing if each.startswith(("ACCELERATE_", "FSDP_", "WORLD"))}
