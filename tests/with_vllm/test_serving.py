"""A policy behind vLLM's server sees the prompts it was trained on, and its calls reach clients as calls."""

import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import anyio
import pytest
import torch
from helpers.families import FAMILIES, end_of_turn_ids, family_tokenizer
from helpers.policies import save_tiny_model
from helpers.runs import make_trainer
from helpers.sums import SERVERS
from helpers.vllm_server import vllm_server
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from mcp_grpo import (
    Endpoint,
    Task,
    ToolCall,
    ToolPool,
    evaluate,
    export_for_serving,
    load_adapter,
    serve_command,
)
from mcp_grpo.errors import SettingsError
from mcp_grpo.publishing import read_policy_file, tool_parser, write_policy_file
from mcp_grpo.publishing.serve import write_tool_parser
from mcp_grpo.rollout import Renderer, set_call_format


pytestmark = pytest.mark.full


LORA = LoraConfig(r=4, target_modules="all-linear")
PARSERS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_nothink": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "glm4moe": "glm45",
    "gptoss": "openai",
    "lfm2_v2": "lfm2",
    "gemma4": "gemma4",
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, wide_adding_model: str) -> Path:
    """Folder of an adapter that was trained for a step."""
    folder = tmp_path_factory.mktemp("served") / "sums"
    with make_trainer(folder, wide_adding_model, peft_config=LORA, max_steps=1) as trainer:
        trainer.train()
        trainer.save_model()
    return folder


@pytest.mark.parametrize(("family", "parser"), PARSERS.items())
def test_a_family_s_calls_have_the_parser_that_reads_them(family: str, parser: str) -> None:
    assert tool_parser(family_tokenizer(family)) == parser


def test_calls_that_no_parser_is_known_for_are_refused() -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    with pytest.raises(SettingsError, match="No parser of vLLM is known"):
        tool_parser(tokenizer)


def test_the_command_names_the_base_the_adapter_the_template_and_the_parser(
    adapter: Path, wide_adding_model: str
) -> None:
    words = shlex.split(serve_command(adapter))
    assert words[:3] == ["vllm", "serve", wide_adding_model]
    options = dict(pairwise(words))
    assert options["--lora-modules"] == f"sums={adapter}"
    assert options["--max-lora-rank"] == "8"
    assert options["--chat-template"] == str(adapter / "chat_template.jinja")
    assert json.loads(options["--default-chat-template-kwargs"]) == {"enable_thinking": False}
    assert options["--tool-call-parser"] == "hermes"
    assert options["--generation-config"] == "vllm"  # not the base model's own way of sampling


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"alpha_pattern": {"q_proj": 32}}, "`alpha_pattern` scales layers"),
        ({"rank_pattern": {"q_proj": 2}}, "`rank_pattern` scales layers"),
        ({"use_dora": True}, "`use_dora` is on"),
        ({"modules_to_save": ["norm"]}, "`modules_to_save` are whole layers"),
    ],
)
def test_an_adapter_that_vllm_would_apply_otherwise_is_exported_instead(
    tmp_path: Path, adapter: Path, wide_adding_model: str, settings: dict[str, Any], problem: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(wide_adding_model)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
    policy: Any = get_peft_model(base, config).eval()
    policy.save_pretrained(tmp_path / "odd")
    AutoTokenizer.from_pretrained(adapter).save_pretrained(tmp_path / "odd")
    with pytest.raises(SettingsError, match=rf"another policy: {problem}.*`export_for_serving`"):
        serve_command(tmp_path / "odd")
    assert "--enable-lora" not in export_for_serving(tmp_path / "odd", tmp_path / "whole")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
        torch.testing.assert_close(whole(ids).logits, policy(ids).logits, atol=1e-4, rtol=1e-4)


def quantized(**changes: Any) -> BitsAndBytesConfig:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(**{**settings, "bnb_4bit_compute_dtype": torch.float32, **changes})


def on_quantized_base(adapter: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(adapter, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    write_policy_file(folder, replace(read_policy_file(folder), quantization=quantized(**changes).to_dict()))
    return folder


def test_what_quantised_the_base_model_is_saved_and_told(tmp_path: Path, wide_adding_model: str) -> None:
    with make_trainer(tmp_path, wide_adding_model, peft_config=LORA) as trainer:
        trainer.save_model()
        assert read_policy_file(tmp_path).quantization is None
        assert "Its base model was quantised" not in (tmp_path / "README.md").read_text()
        trainer.model.config.quantization_config = quantized()
        trainer.save_model()
    assert read_policy_file(tmp_path).quantization == quantized().to_dict()
    assert "Its base model was quantised" in (tmp_path / "README.md").read_text()


def test_a_base_model_that_was_quantised_in_training_is_quantised_by_vllm(adapter: Path, tmp_path: Path) -> None:
    assert "--quantization" not in shlex.split(serve_command(adapter))
    options = dict(pairwise(shlex.split(serve_command(on_quantized_base(adapter, tmp_path / "sums")))))
    assert options["--quantization"] == "bitsandbytes"


@pytest.mark.parametrize(
    "changes",
    [
        {"bnb_4bit_quant_type": "fp4"},
        {"bnb_4bit_use_double_quant": False},
        {"load_in_4bit": False, "load_in_8bit": True},
    ],
)
def test_a_base_model_that_vllm_would_quantise_otherwise_is_refused(
    adapter: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match=r"quantised otherwise.*`export_for_serving`"):
        serve_command(on_quantized_base(adapter, tmp_path / "sums", **changes))


def test_a_base_model_is_loaded_as_it_was_quantised_in_training_unless_said_otherwise(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked, original = on_quantized_base(adapter, tmp_path / "sums"), [], AutoModelForCausalLM.from_pretrained

    def in_full(*args: Any, quantization_config: Any, **kwargs: Any) -> Any:
        asked.append(quantization_config)
        return original(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", in_full)
    load_adapter(folder)
    load_adapter(folder, quantization_config=None)
    assert [each and each.to_dict() for each in asked] == [quantized().to_dict(), None]


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra `quantization`")
def test_a_policy_on_a_quantised_base_model_is_exported_with_the_weights_it_was_trained_on(
    adapter: Path, tmp_path: Path
) -> None:
    folder = on_quantized_base(adapter, tmp_path / "sums")
    words = shlex.split(export_for_serving(folder, tmp_path / "whole", dtype=torch.float32))
    assert "--quantization" not in words
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    policy, _ = load_adapter(folder, dtype=torch.float32)
    in_full, _ = load_adapter(folder, dtype=torch.float32, quantization_config=None)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = policy(ids).logits
        # On a CPU, quantised layers round to bfloat16.
        apart, apart_in_full = ((each(ids).logits - expected).norm() for each in (whole, in_full))
    assert apart < 0.25 * apart_in_full, (apart, apart_in_full)


def test_an_export_is_one_model_with_the_adapter_in_it(adapter: Path, tmp_path: Path) -> None:
    words = shlex.split(export_for_serving(adapter, tmp_path / "whole"))
    assert words[2] == str(tmp_path / "whole")
    assert "--enable-lora" not in words
    whole, (policy, _) = AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), load_adapter(adapter)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, policy(ids).logits, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    assert tokenizer.chat_template == (adapter / "chat_template.jinja").read_text()


@pytest.mark.vllm
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name != "gptoss"]
)  # its parser reads tokens, not text
def test_vllm_s_parser_reads_what_the_family_s_template_writes(family: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: TID251
    from vllm.tool_parsers import ToolParserManager  # noqa: TID251

    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": schema}}
    arguments = {"city": "Paris", "days": 3}
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [{"role": "user", "content": "Paris?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = family_tokenizer(family)
    before = tokenizer.apply_chat_template(messages[:1], tools=[tool], tokenize=False)
    turn = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False).removeprefix(before)
    for end in FAMILIES[family].ends:
        turn = turn.removesuffix("\n").removesuffix(end)
    for header in ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|im_start|>assistant\n"):
        turn = turn.removeprefix(header)
    request = ChatCompletionRequest(model="m", messages=messages[:1], tools=[tool], tool_choice="auto")
    parser = ToolParserManager.get_tool_parser(tool_parser(tokenizer))(tokenizer, request.tools)
    (found,) = parser.extract_tool_calls(turn, request).tool_calls
    assert found.function.name == "weather"
    assert json.loads(found.function.arguments) == arguments


FENCED = 'I add.\n```json\n{"name": "weather", "arguments": {"city": "{Paris}``` é"}}\n```\n```json\n{"name": "add", "arguments": {}}\n```'


@pytest.fixture(scope="module")
def fenced_parser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The parser that is written beside a policy whose calls are in fenced JSON, as vLLM loads it."""
    from vllm.tool_parsers import ToolParserManager  # noqa: TID251

    tokenizer = family_tokenizer("qwen2_5")
    set_call_format(tokenizer, "json")
    folder = tmp_path_factory.mktemp("fenced")
    write_tool_parser(folder, tokenizer)
    ToolParserManager.import_tool_parser(str(folder / "tool_parser.py"))
    return lambda: ToolParserManager.get_tool_parser(tool_parser(tokenizer))(tokenizer)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("turn", "content", "calls"),
    [
        (FENCED, "I add.", [("weather", {"city": "{Paris}``` é"}), ("add", {})]),
        ("It is 5.", "It is 5.", []),
        ('As JSON:\n```json\n{"sum": 5}\n```', 'As JSON:\n```json\n{"sum": 5}\n```', []),
        ('```json\n{"name": "add", "arguments": {\n```', '```json\n{"name": "add", "arguments": {\n```', []),
    ],
)
def test_calls_in_fenced_json_are_served_as_those_of_the_openai_api(
    fenced_parser: Any, turn: str, content: str, calls: list[Any]
) -> None:
    found = fenced_parser().extract_tool_calls(turn, None)
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls] == calls
    assert found.content == content


@pytest.mark.vllm
@pytest.mark.parametrize("width", [1, 3, 1000])
def test_calls_in_fenced_json_are_streamed(fenced_parser: Any, width: int) -> None:
    parser, content, names, arguments = fenced_parser(), "", [], ["", ""]
    ends = [*range(width, len(FENCED), width), len(FENCED)]
    for start, end in pairwise([0, *ends]):
        delta = parser.extract_tool_calls_streaming(FENCED[:start], FENCED[:end], FENCED[start:end], [], [], [], None)
        content += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            names += [call.function.name] if call.function.name else []
            arguments[call.index] += call.function.arguments or ""
    assert content == "I add.\n"
    assert names == ["weather", "add"]
    assert [json.loads(each) for each in arguments] == [{"city": "{Paris}``` é"}, {}]


def test_a_policy_with_calls_in_fenced_json_is_served_with_its_parser(tmp_path: Path) -> None:
    folder = Path(save_tiny_model(tmp_path / "policy"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    set_call_format(tokenizer, "json")
    tokenizer.save_pretrained(folder)
    words = shlex.split(serve_command(folder))
    options = dict(pairwise(words))
    assert options["--tool-call-parser"] == "fenced_json"
    assert options["--tool-parser-plugin"] == str(folder / "tool_parser.py")


@pytest.fixture(scope="module")
def served(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a vLLM server that `serve_command` started."""
    _, _, model, *words = shlex.split(serve_command(adapter))
    words = ["--model", model, *words, "--max-model-len=1024", "--max-num-seqs=4"]
    with vllm_server(words, tmp_path_factory.mktemp("vllm_serve") / "log.txt") as server:
        yield server.wait()


@pytest.fixture
def client(served: str) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=f"{served}/v1", api_key="none") as client:
        yield client


def tokenize(url: str, **body: Any) -> list[int]:
    request = Request(f"{url}/tokenize", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=60) as response:
        return json.load(response)["tokens"]


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_client_of_the_server_calls_a_real_tool_and_every_prompt_is_that_of_training(
    served: str, client: Any, adapter: Path, adding_tools: list[dict[str, Any]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    renderer = Renderer(
        tokenizer,
        end_of_turn_ids=end_of_turn_ids("qwen3", tokenizer),
        chat_template_kwargs={"enable_thinking": False},
    )
    history: list[Any] = [{"role": "user", "content": "2+3?"}]
    trained_on = list(renderer.prompt_ids(history, adding_tools))
    assert (
        tokenize(served, model="sums", messages=history, tools=adding_tools, add_generation_prompt=True) == trained_on
    )

    # `extra_body`: what vLLM returns beside the OpenAI API.
    settings: Any = {"model": "sums", "tools": adding_tools, "temperature": 0, "max_tokens": 200}
    first = client.chat.completions.create(messages=history, **settings, extra_body={"return_token_ids": True})
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls or ()
    assert call.function.name == "add"

    async def result() -> str:
        async with ToolPool(SERVERS) as pool, pool.lease(Task(task_id="sum", prompt=())) as lease:
            arguments = json.loads(call.function.arguments)
            return (await lease.call(ToolCall(name=call.function.name, arguments=arguments))).text

    answer = anyio.run(result)
    assert answer == "5"
    history += [
        {"role": "assistant", "content": message.content, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": answer},
    ]
    sampled = list(first.choices[0].token_ids)
    trained_on += [*sampled, *renderer.suffix_ids([{"role": "tool", "name": "add", "content": answer}])]
    assert (
        tokenize(served, model="sums", messages=history, tools=adding_tools, add_generation_prompt=True) == trained_on
    )
    second = client.chat.completions.create(messages=history, **settings)
    assert second.choices[0].message.content in ("5", "6")


@pytest.mark.vllm
def test_a_served_policy_is_evaluated_by_its_own_tool_calling(served: str) -> None:
    task = Task(task_id="sum", prompt=({"role": "user", "content": "2+3?"},), answer="5")
    endpoint = Endpoint(base_url=f"{served}/v1", model="sums", temperature=0.0, max_turn_tokens=64, max_turns=3)
    found = evaluate(endpoint, [task], SERVERS, k=2)
    assert found.num_failed == 0
    assert found.tools["add"].calls >= 2
    assert found.tools["add"].errors == {}
    assert found.tokens > 0
