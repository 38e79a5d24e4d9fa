"""Load a policy from a folder or from the Hub, as it was trained."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.quantizers.auto import AutoQuantizationConfig

from mcp_grpo.errors import SettingsError
from mcp_grpo.learning import value_head_from_pretrained
from mcp_grpo.publishing.policy_file import read_policy_file


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
    Load a trained policy, with its tokenizer and chat template.

    Args:
        source (`str` or `Path`):
            Folder that a trainer saved a policy to, or its name on the Hub.
        base (`str` or `Path`, *optional*):
            Base model of an adapter, if not the one that its configuration names.
        value_head (`bool`, *optional*, defaults to `False`):
            Whether to attach the value head of training, so that the output has `value_preds`; see
            [`value_head_from_pretrained`].
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.
        token (`str`, *optional*):
            Token for a private policy on the Hub.
        model_kwargs (`Any`):
            Passed to `from_pretrained` of the (base) model, such as `dtype` and `device_map`. A base model that was
            quantised for training is quantised in the same way, unless a `quantization_config` is given;
            `quantization_config=None` loads it unquantised.

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
    """Load the base model of an adapter, quantised as it was in training."""
    quantization = read_policy_file(folder).quantization
    if quantization and "quantization_config" not in model_kwargs:
        model_kwargs["quantization_config"] = AutoQuantizationConfig.from_dict(quantization)
    name = base_of(folder, base)
    try:
        return AutoModelForCausalLM.from_pretrained(name, **model_kwargs)
    except OSError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SettingsError(
            f"The base model {name!r} of the adapter in {folder} cannot be loaded. Pass `base`, the base model's folder or its "
            f"name on the Hub. The reason: {reason}"
        ) from error


def local_folder(source: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """Return the folder with the files of a policy, downloaded if need be."""
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), revision=revision, token=token))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SettingsError(
            f"There is no policy at {str(source)!r}. Name the output folder of a run, or a model of the Hub. It is no folder, "
            f"and the Hub says: {reason}"
        ) from error


def base_of(folder: Path, base: str | Path | None) -> str:
    """Return the base model of an adapter: a folder or a name on the Hub. Raise [`SettingsError`] if there is none."""
    found = base or PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if not found:
        raise SettingsError(
            f"The adapter in {folder} does not name its base model, because that was a folder of the machine it was trained "
            "on. Pass `base`, the base model's folder or its name on the Hub."
        )
    return str(found)
