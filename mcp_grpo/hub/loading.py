"""A policy from a folder or from the Hub, as it was trained."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.quantizers.auto import AutoQuantizationConfig

from mcp_grpo.errors import SettingsError
from mcp_grpo.hub.facts import read_facts
from mcp_grpo.learning import value_head_from_pretrained


def load_adapter(
    source: str | Path,
    *,
    base: str | Path | None = None,
    value_head: bool = False,
    revision: str | None = None,
    token: str | None = None,
    **model_kwargs: Any,
) -> tuple[Any, Any]:
    """
    Load a policy that was trained, with its tokenizer and the chat template that it was trained on.

    Args:
        source (`str` or `Path`):
            Folder that a trainer saved a policy to, or its name on the Hub.
        base (`str` or `Path`, *optional*):
            The base model of an adapter, if it is to be another than the one that its configuration names.
        value_head (`bool`, *optional*, defaults to `False`):
            Whether the model gets the value head that it was trained with, so that its output has `value_preds`; see
            [`value_head_from_pretrained`].
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.
        token (`str`, *optional*):
            For a policy on the Hub that is not public.
        model_kwargs (`Any`):
            Passed on to `from_pretrained` of the (base) model, such as `dtype` and `device_map`. A base model that was
            quantised when it was loaded for training is quantised likewise, unless there is a `quantization_config`;
            `quantization_config=None` loads it as it is.

    Returns:
        `tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]`: The model, in evaluation mode, and its tokenizer.

    Raises:
        [`SettingsError`]: If the base model of an adapter is not known, or there is no value head.

    Example:

    ```python
    from mcp_grpo import load_adapter

    model, tokenizer = load_adapter("somebody/qwen3-shop")
    ```
    """
    folder = local_folder(source, revision=revision, token=token)
    if (folder / "adapter_config.json").is_file():
        model: Any = PeftModel.from_pretrained(load_base(folder, base, token=token, **model_kwargs), str(folder))
    else:
        if base is not None:
            raise SettingsError(f"{source} is a whole model, not an adapter. Leave `base` out, got {str(base)!r}.")
        model = AutoModelForCausalLM.from_pretrained(folder, **model_kwargs)
    if value_head:
        value_head_from_pretrained(model, folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def load_base(folder: Path, base: str | Path | None = None, **model_kwargs: Any) -> Any:
    """
    The base model of an adapter, quantised as it was in training.

    Args:
        folder (`Path`):
            The adapter's folder.
        base (`str` or `Path`, *optional*):
            What to take instead of the one that it names.
        model_kwargs (`Any`):
            Passed on to `from_pretrained`; see [`load_adapter`].

    Returns:
        `PreTrainedModel`: The model.
    """
    quantization = read_facts(folder).quantization
    if quantization and "quantization_config" not in model_kwargs:
        model_kwargs["quantization_config"] = AutoQuantizationConfig.from_dict(quantization)
    return AutoModelForCausalLM.from_pretrained(base_of(folder, base), **model_kwargs)


def local_folder(source: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """
    Where the files of a policy are, downloaded if need be.

    Args:
        source (`str` or `Path`):
            A folder, or a name on the Hub.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.
        token (`str`, *optional*):
            For what is not public.

    Returns:
        `Path`: The folder.
    """
    if Path(source).is_dir():
        return Path(source)
    return Path(snapshot_download(str(source), revision=revision, token=token))


def base_of(folder: Path, base: str | Path | None) -> str:
    """
    The base model of an adapter.

    Args:
        folder (`Path`):
            The adapter's folder.
        base (`str` or `Path`, *optional*):
            What to take instead of the one that it names.

    Returns:
        `str`: Its folder, or its name on the Hub.

    Raises:
        [`SettingsError`]: If there is none.
    """
    found = base or PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if not found:
        raise SettingsError(
            f"The adapter in {folder} does not name its base model, because that was a folder of the machine it was trained "
            "on. Pass `base`, the base model's folder or its name on the Hub."
        )
    return str(found)
