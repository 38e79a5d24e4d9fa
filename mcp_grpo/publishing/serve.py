"""Serve a trained policy by vLLM, with its training prompts and calls that clients understand."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from peft import PeftConfig, PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mcp_grpo.errors import SettingsError
from mcp_grpo.publishing.load import base_of, load_adapter, load_base, local_folder
from mcp_grpo.publishing.policy_file import read_policy_file, write_policy_file
from mcp_grpo.sampling.adapter_export import config_problem, max_lora_rank


FENCED_JSON = "fenced_json"  # the parser in the file below
TOOL_PARSER_FILE = "tool_parser.py"

# What a rendered call holds in each format, and the name of vLLM's parser for it. The first that fits is it.
_PARSERS = (
    ("<arg_key>", "glm45"),
    ("<tool_call>\n<function=", "qwen3_coder"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_call>call:", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<|channel|>commentary", "openai"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("```json\n{", FENCED_JSON),
    ('{"name": "probe", "parameters": ', "llama3_json"),
)
_CALL = {"type": "function", "function": {"name": "probe", "arguments": {"text": "word"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


def tool_parser(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of vLLM's parser for the calls of a chat template; raise [`SettingsError`] if none is known."""
    messages = [{"role": "user", "content": "Probe."}]
    try:
        before: Any = tokenizer.apply_chat_template(
            messages, tools=[_TOOL], tokenize=False, add_generation_prompt=True
        )
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        text: Any = tokenizer.apply_chat_template([*messages, call], tools=[_TOOL], tokenize=False)
    except jinja2.TemplateError as error:
        raise SettingsError(
            f"The chat template cannot write a tool call: {error}. Use the one that was trained on."
        ) from error
    # Only what was written for the turn: a system prompt may well explain another format.
    shared = next(
        (i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), min(len(before), len(text))
    )
    turn = text[text.rfind("<", 0, shared) if "<" in before[:shared] else shared :]
    for mark, name in _PARSERS:
        if mark in turn:
            return name
    raise SettingsError(
        f"No parser of vLLM is known for calls that are written as {turn[:200]!r}. `vllm serve --help` lists the parsers; pass "
        "the right one as `--tool-call-parser`."
    )


def serve_command(
    source: str | Path, *, base: str | Path | None = None, name: str | None = None, revision: str | None = None
) -> str:
    """
    Return the command that serves a policy by vLLM as it was trained.

    It names the chat template of training with its arguments, so that the policy sees the same histories, and the parser
    that turns the policy's calls into those of the OpenAI API. Requests without sampling settings are sampled at
    temperature 1 from all tokens, as by default in training, not by the base model's settings.

    Args:
        source (`str` or `Path`):
            Folder of a policy, or its name on the Hub.
        base (`str` or `Path`, *optional*):
            Base model of an adapter, if not the one that its configuration names.
        name (`str`, *optional*):
            Name for clients; that of its folder by default.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.

    Returns:
        `str`: The command, for a shell.

    Raises:
        [`SettingsError`]: If vLLM would not apply the adapter as it was trained; see [`export_for_serving`].

    Example:

    ```python
    >>> print(serve_command("outputs/shop"))
    vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 32 --lora-modules shop=outputs/shop --generation-config vllm --chat-template outputs/shop/chat_template.jinja --default-chat-template-kwargs '{"enable_thinking": false}' --enable-auto-tool-choice --tool-call-parser hermes
    ```
    """
    folder = _no_flag(str(local_folder(source, revision=revision)))
    name = name or Path(source).name
    words = ["vllm", "serve"]
    if Path(folder, "adapter_config.json").is_file():
        config: Any = PeftConfig.from_pretrained(folder)
        quantization = read_policy_file(folder).quantization
        if problem := config_problem(config) or _scale_problem(config) or _quantization_problem(quantization):
            raise SettingsError(
                f"vLLM would serve {source} as another policy: {problem}. Call `export_for_serving`, which makes one whole model "
                "of it."
            )
        words += [
            _no_flag(base_of(Path(folder), base)),
            "--enable-lora",
            "--max-lora-rank",
            str(max_lora_rank(config)),
        ]
        is_plain = not name.startswith("-") and not set("=,") & set(name + folder)
        module = f"{name}={folder}" if is_plain else json.dumps({"name": name, "path": folder})
        words += ["--lora-modules", module]
        words += ["--quantization", "bitsandbytes"] if quantization else []
    else:
        words += [
            folder,
            *([f"--served-model-name={name}"] if name.startswith("-") else ["--served-model-name", name]),
        ]
    # Or requests that name no temperature are sampled by the base model's settings, which training did not use.
    words += ["--generation-config", "vllm", "--chat-template", f"{folder}/chat_template.jinja"]
    if settings := read_policy_file(folder).chat_template_kwargs:
        words += ["--default-chat-template-kwargs", json.dumps(settings)]
    parser = tool_parser(AutoTokenizer.from_pretrained(folder))
    if parser == FENCED_JSON:
        words += ["--tool-parser-plugin", f"{folder}/{TOOL_PARSER_FILE}"]
    return shlex.join([*words, "--enable-auto-tool-choice", "--tool-call-parser", parser])


def _no_flag(path: str) -> str:
    """Return a path that no command line takes for a flag."""
    return f"./{path}" if path.startswith("-") else path


def write_tool_parser(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write beside a policy the parser of its calls, if vLLM has none of its own for them."""
    try:
        is_needed = tool_parser(tokenizer) == FENCED_JSON
    except SettingsError:  # it is told when somebody wants to serve the policy
        return
    if is_needed:
        shutil.copyfile(Path(__file__).with_name(TOOL_PARSER_FILE), Path(folder, TOOL_PARSER_FILE))


def export_for_serving(
    source: str | Path,
    output_dir: str | Path,
    *,
    base: str | Path | None = None,
    revision: str | None = None,
    **model_kwargs: Any,
) -> str:
    """
    Write a policy as one whole model, for servers that take no adapters.

    A base model that was quantised for training is quantised in the same way and then written in full, so that the adapter
    is added to the weights that it was trained on.

    Args:
        source (`str` or `Path`):
            Folder of an adapter, or its name on the Hub.
        output_dir (`str` or `Path`):
            Folder for the model, its tokenizer and the chat template of training.
        base (`str` or `Path`, *optional*):
            Base model, if not the one that the adapter names.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.
        model_kwargs (`Any`):
            Passed to `from_pretrained` of the base model, such as `dtype`.

    Returns:
        `str`: The command that serves it; see [`serve_command`].
    """
    folder = local_folder(source, revision=revision)
    settings = read_policy_file(folder)
    if settings.quantization:
        # Merged into quantised weights, the adapter would be rounded to theirs.
        model: Any = PeftModel.from_pretrained(load_base(folder, base, **model_kwargs).dequantize(), str(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    else:
        model, tokenizer = load_adapter(folder, base=base, **model_kwargs)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    write_policy_file(output_dir, replace(settings, quantization=None))
    write_tool_parser(output_dir, tokenizer)
    return serve_command(output_dir)


def _quantization_problem(quantization: dict[str, Any] | None) -> str | None:
    """Return the problem of a quantisation that vLLM cannot apply itself."""
    expected = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    if quantization is None or all(quantization.get(name) == value for name, value in expected.items()):
        return None
    return "its base model was quantised otherwise than to nf4 with double quantisation, which is all that vLLM does by itself"


def _scale_problem(config: Any) -> str | None:
    """Return the problem of an adapter whose layers are scaled differently, which vLLM cannot do."""
    names = [name for name in ("rank_pattern", "alpha_pattern") if getattr(config, name)]
    return f"`{names[0]}` scales layers by different factors" if names else None
