"""A value head that reads the policy's own hidden states, in the same forward pass as the log-probabilities."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from mcp_grpo.errors import SettingsError
from mcp_grpo.trl_compat import FusedCausalLMOutput, add_fused_lm_head, give_values


VALUE_HEAD = "value_head"  # its name in the model and in its state dict
VALUE_HEAD_FILE = "value_head.safetensors"  # beside the model
KIND = "linear"  # written with its weights


class ValueHead(nn.Module):
    """
    One linear layer that estimates the return still to come, from the hidden state after each token.

    It starts at zero: before the head has learnt, it changes no advantage. It only reads: the policy's gradient is what it would
    be without a head, bit by bit. It computes in the type of its weights, whatever autocast says.

    Args:
        hidden_size (`int`):
            Size of the hidden states.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Type of the weights.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.out = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the values of hidden states of shape `(B, L, H)`, of shape `(B, L)`, in `float32`."""
        # Asked of the weights on every call, for wrappers such as FSDP replace them.
        read = hidden.detach().to(self.out.weight.device, self.out.weight.dtype)
        with torch.autocast(read.device.type, enabled=False):
            return self.out(read).squeeze(-1).float()


@dataclass
class FusedValueOutput(FusedCausalLMOutput):
    """
    Output of a model with a value head, called with `fused_lm_head=True` and `num_values`.

    Args:
        value_preds (`torch.Tensor` of shape `(B, num_values)`):
            Value of the state after each of the last tokens of the input, padding included. Every other field is TRL's.
    """

    value_preds: torch.Tensor | None = None


def add_value_head(model: Any, dtype: torch.dtype = torch.float32) -> ValueHead:
    """
    Add a value head to a model that TRL has given a fused LM head.

    `model(..., labels=labels, fused_lm_head=True, num_values=n)` then returns a [`FusedValueOutput`] with the values of the last
    `n` positions. Every other call is as before, and so is generation. The random state is left as it was.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model, before it is wrapped for several processes.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Type of the weights. FSDP wants that of the other trained weights.

    Returns:
        [`ValueHead`]: The head, which is also `value_head` of the causal language model.
    """
    lm = _causal_lm(model)
    if VALUE_HEAD in lm._modules:
        raise SettingsError(
            f"{type(lm).__name__} has a value head already. Use that one (`model.{VALUE_HEAD}`), or load the model anew."
        )
    if not _has_fused_lm_head(lm):
        raise SettingsError(
            f"{type(lm).__name__} has no fused LM head, and the values come with its log-probabilities. Build the trainer "
            "first, which adds one, or call `trl.trainer.add_fused_lm_head(model)`."
        )
    output_layer = lm.get_output_embeddings()
    # On the CPU, so that no other generator than the one that is put back is used.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        head = ValueHead(output_layer.in_features, dtype)
    lm.add_module(VALUE_HEAD, head.to(output_layer.weight.device))
    give_values(lm, FusedValueOutput)
    return head


class ValueRecorder:
    """
    Calls a model and remembers the values it gave, for a caller that keeps only the log-probabilities.

    It stands in for the model in one call of TRL's `_get_per_token_logps_and_entropies`, which may call the model on
    several parts of a batch.

    Args:
        model (`Callable`):
            Model with a value head, which may be wrapped for several processes.
        num_tokens (`int`):
            Length `T` of the completions: values are asked for only there.

    Example:

    ```python
    recorder = ValueRecorder(model, num_tokens)
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(recorder, input_ids, attention_mask, num_tokens)
    values = recorder.values()  # same shape as `logps`
    ```
    """

    def __init__(self, model: Any, num_tokens: int) -> None:
        self._model = model
        self._num_values = num_tokens + 1  # before the first token, and after each
        self._parts: list[torch.Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, num_values=self._num_values, **kwargs)
        if isinstance(output, FusedValueOutput) and output.value_preds is not None:
            self._parts.append(output.value_preds)
        return output

    def values(self) -> torch.Tensor:
        """Return, of shape `(B, T)`, the value before each completion token, which lines up with its log-probability."""
        return self._recorded()[:, :-1]

    def values_after(self) -> torch.Tensor:
        """Return, of shape `(B, T)`, the value after each completion token: that of the last one stands for what was cut."""
        return self._recorded()[:, 1:]

    def _recorded(self) -> torch.Tensor:
        if not self._parts:
            raise SettingsError(
                "The model gave no values. Give it a head with `add_value_head`, and call it with `fused_lm_head=True`."
            )
        return torch.cat(self._parts)


def without_value_head(
    state_dict: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split the weights of a model, which may be wrapped, from those of its value head, under the names the head has."""
    rest, head = {}, {}
    for name, weight in state_dict.items():
        _, found, own_name = f".{name}".partition(f".{VALUE_HEAD}.")
        (head if found else rest)[own_name or name] = weight
    return rest, head


def save_value_head(head: ValueHead, folder: str | Path, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a value head beside its model; `state_dict` has its weights where the head holds only a part of them."""
    weights = {name: w.detach().contiguous() for name, w in (state_dict or head.state_dict()).items()}
    save_file(weights, Path(folder) / VALUE_HEAD_FILE, metadata={"format": "pt", "kind": KIND})


def load_value_head(head: ValueHead, folder: str | Path) -> bool:
    """Read the weights of a value head, which may be sharded by FSDP. Return whether there were any."""
    file = Path(folder) / VALUE_HEAD_FILE
    if not file.exists():
        return False
    with safe_open(file, framework="pt") as saved:
        kind = (saved.metadata() or {}).get("kind")
    if kind != KIND:
        raise SettingsError(
            f"{file} holds a value head of kind {kind!r}, and only {KIND!r} ones can be read. Move the file away to start with "
            "a new head."
        )
    weights = load_file(file)
    found, expected = ({name: tuple(w.shape) for name, w in each.items()} for each in (weights, head.state_dict()))
    if found != expected:
        raise SettingsError(
            f"{file} holds weights of shapes {found}, but this head has {expected}. Load it into the model that it was "
            "trained with."
        )
    set_model_state_dict(head, dict(weights), options=StateDictOptions(full_state_dict=True))
    return True


def value_head_from_pretrained(model: Any, folder: str | Path) -> ValueHead:
    """
    Give a model the value head that it was trained with, to look at values after training.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The trained model.
        folder (`str` or `Path`):
            Folder that it was saved to.

    Returns:
        [`ValueHead`]: The head.

    Raises:
        [`SettingsError`]: If there is no head in the folder, or the model has one already.

    Example:

    ```python
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mcp_grpo.learning.value_head import value_head_from_pretrained

    model = AutoModelForCausalLM.from_pretrained("outputs/run")
    tokenizer = AutoTokenizer.from_pretrained("outputs/run")
    value_head_from_pretrained(model, "outputs/run")

    inputs = tokenizer("2+3?", return_tensors="pt")
    with torch.no_grad():
        num_values = inputs["input_ids"].size(1)
        output = model(**inputs, labels=inputs["input_ids"], fused_lm_head=True, num_values=num_values)
    for token, value in zip(inputs["input_ids"][0], output.value_preds[0]):
        print(f"{value:6.2f} after {tokenizer.decode(token)!r}")
    ```
    """
    file = Path(folder) / VALUE_HEAD_FILE
    if not file.exists():
        raise SettingsError(
            f"There is no {VALUE_HEAD_FILE} in {folder}. Pass the folder of a model that was trained with a value head."
        )
    lm = _causal_lm(model)
    if not _has_fused_lm_head(lm):
        add_fused_lm_head(lm)
    head = add_value_head(model)
    load_value_head(head, folder)
    return head


def _causal_lm(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _has_fused_lm_head(lm: Any) -> bool:
    return "fused_lm_head" in inspect.signature(lm.forward, follow_wrapped=False).parameters
