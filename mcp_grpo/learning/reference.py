"""A reference for the KL term that follows the policy."""

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from peft import LoraConfig, PeftModel
from peft.tuners import lora
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from mcp_grpo.errors import SettingsError
from mcp_grpo.precision import in_double
from mcp_grpo.trl_compat import disable_dropout_in_model


REFERENCE_FILE = "reference.safetensors"

ReferenceMode = Literal["ema", "hard"]

_POLICY_ADAPTER = "default"
_REFERENCE_ADAPTER = "ref"  # the name that TRL looks for
_NUM_SYNCS = "num_syncs"
_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod"}
_BASE_CHANGING = ("pissa", "corda", "olora", "loftq", "lora_ga")
_MAX_AT_ONCE = 2**18  # numbers: fewer calls the more there are, but they are copied


class _Slot(NamedTuple):
    """Where a parameter is kept. It is read there each time, since sharding replaces parameters."""

    owner: nn.Module
    leaf: str

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.owner._parameters[self.leaf]
        assert parameter is not None
        return parameter


class _Pair(NamedTuple):
    """A parameter of the reference, and what it follows."""

    name: str
    policy: torch.Tensor
    reference: torch.Tensor

    @property
    def is_sharded(self) -> bool:
        return any(isinstance(each, DTensor) or _is_zero3(each) for each in _members([self]))


class MovingReference:
    """
    Moves the reference of TRL's KL term after the policy.

    With adapters the reference is the adapter "ref", which TRL uses of its own accord if there is one. Here it is added
    as a copy of "default", unless TRL has done so; it has no dropout and is never trained. It is the factors of the
    adapter that are averaged, not their product. Without adapters the reference is TRL's `ref_model`.

    What the policy does not train, buffers and the value head are left alone. Averages are kept in float32: in bfloat16,
    one hundredth of a small difference is rounded away, and the reference would not move at all.

    On several processes, all must call `sync`, `difference`, `state_dict`, `save` and `load` together.

    Args:
        policy (`PreTrainedModel` or `PeftModel`):
            The policy, unwrapped.
        reference (`nn.Module`, *optional*):
            TRL's `ref_model`. Needed for a policy without adapters.
        mode (`str`, *optional*, defaults to `"ema"`):
            `"ema"` for `decay * reference + (1 - decay) * policy`, `"hard"` for a copy of the policy.
        decay (`float`, *optional*, defaults to `0.99`):
            Weight of the reference in its moving average.
        autocast_dtype (`torch.dtype`, *optional*):
            What forward passes compute in, if under autocast. The factors of the adapter "ref" are then held in it beside
            their average: autocast would round them to it in every pass, and activations would go to float32 and back.
            Log-probabilities are the same, bit by bit. Not for parameters that are to be sharded, where all must have one
            dtype.

    Attributes:
        num_syncs (`int`):
            How often the reference has moved.

    Raises:
        [`SettingsError`]: If a parameter has no counterpart, or a setting cannot be.
    """

    def __init__(
        self,
        policy: nn.Module,
        reference: nn.Module | None = None,
        *,
        mode: ReferenceMode = "ema",
        decay: float = 0.99,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        if mode not in get_args(ReferenceMode):
            raise SettingsError(f"`mode` must be one of {get_args(ReferenceMode)}, got {mode!r}.")
        if not 0 < decay < 1:
            raise SettingsError(
                f"`decay` must be between 0 and 1, got {decay}. It is the weight of the reference: 0.99 moves it by a "
                'hundredth of the way to the policy. To copy the policy, use `mode="hard"`.'
            )
        if isinstance(policy, PeftModel):
            _ensure_reference_adapter(policy)
            names = _adapter_names(policy)
            self._models = [policy]
        elif reference is None:
            raise SettingsError(
                "A policy without adapters needs a `reference` to move. TRL makes one, `trainer.ref_model`, if `beta` is "
                "not 0."
            )
        else:
            names = _shared_names(policy, reference)
            self._models = [policy, reference]
        ours, theirs = _slots(self._models[0]), _slots(self._models[-1])
        self._slots = {name: (ours[name], theirs[other]) for name, other in names.items()}
        self._mode = mode
        self._decay = decay
        self._shadows: dict[str, torch.Tensor] = {}
        self._narrowed: set[str] = set()
        if autocast_dtype is not None and isinstance(policy, PeftModel):
            self._narrow(policy, autocast_dtype)
        self.num_syncs = 0

    @torch.no_grad()
    def sync(self) -> None:
        """Move the reference towards the policy, or onto it."""
        for pairs in self._batches():
            with _whole(_members(pairs)) as is_writer:
                if is_writer:
                    self._write(pairs, 0.0 if self._mode == "hard" else self._decay)
        self.num_syncs += 1

    @torch.no_grad()
    def difference(self) -> tuple[float, int]:
        """
        How far the reference is from the policy, over all parameters that are averaged and all processes.

        Returns:
            `tuple[float, int]`: Euclidean norm of the difference, and how many elements differ from the policy's, cast to
            the reference's dtype. Where the reference is held in `autocast_dtype`, it is its average that is compared.
        """
        sums: list[torch.Tensor] = []
        for pairs in self._batches():
            with _whole(_members(pairs), is_changed=False):
                sums.append(self._compared(pairs))
        # Read back once, for every time waits for the device.
        squares, num_differing = torch.stack([each.to(sums[0].device) for each in sums]).sum(dim=0).tolist()
        return math.sqrt(squares), int(num_differing)

    @torch.no_grad()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must keep."""
        state = {_NUM_SYNCS: torch.tensor(self.num_syncs)}
        for pair in self._pairs():
            with _whole([pair.reference], is_changed=False) as is_writer:
                if not is_writer:
                    continue
                average = self._average(pair)
                average = average.full_tensor() if isinstance(average, DTensor) else average
                if _is_main():
                    state[_key(pair.name)] = average.detach().to("cpu", copy=True).contiguous()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint. Sharded parameters must be sharded already."""
        expected = {_NUM_SYNCS, *map(_key, self._slots)}
        if wrong := expected.symmetric_difference(state):
            raise SettingsError(
                f"The saved reference is not one of this policy: {_listed(wrong)} is only on one side. Train the same "
                "parameters as before, with the same adapter settings, or start anew."
            )
        for name, _, reference in self._pairs():
            with _whole([reference]) as is_writer:
                if is_writer:
                    self._write([_Pair(name, _placed(state[_key(name)], reference), reference)], 0.0)
        self.num_syncs = int(state[_NUM_SYNCS])

    def save(self, folder: str | Path) -> None:
        """
        Write the state to one file in a folder. A sub-folder with an adapter would make the `Trainer` load only that
        when it resumes.

        Args:
            folder (`str` or `Path`):
                Where to; it gets the file `reference.safetensors`.
        """
        state = self.state_dict()
        if _is_main():
            save_file(state, Path(folder) / REFERENCE_FILE)

    def load(self, folder: str | Path) -> bool:
        """Read the state that [`save`] wrote. Return whether there was one."""
        file = Path(folder) / REFERENCE_FILE
        if not file.is_file():
            return False
        self.load_state_dict(load_file(file))
        return True

    def _pairs(self) -> Generator[_Pair]:
        if torch.distributed.is_initialized():
            for model in self._models:
                _reshard(model)
        for name, (policy, reference) in self._slots.items():
            yield _Pair(name, policy.parameter, reference.parameter)

    def _batches(self) -> Generator[list[_Pair]]:
        """Pairs on one device to handle together, which takes fewer calls. Those that are sharded come alone."""
        batch: list[_Pair] = []
        size = 0
        for pair in self._pairs():
            size += pair.reference.numel()
            if batch and (
                size > _MAX_AT_ONCE
                or pair.is_sharded
                or batch[-1].is_sharded
                or pair.reference.device != batch[-1].reference.device
            ):
                yield batch
                batch, size = [], pair.reference.numel()
            batch.append(pair)
        if batch:
            yield batch

    def _narrow(self, policy: PeftModel, dtype: torch.dtype) -> None:
        """Hold in another dtype what autocast would cast to it. Other parts of an adapter may need all their digits."""
        factors = {id(factor) for factor in _reference_factors(policy)}
        for name, (_, slot) in self._slots.items():
            reference = slot.parameter
            if id(slot.owner) in factors and reference.dtype == torch.float32:
                self._narrowed.add(name)
                self._shadows[name] = reference.data
                reference.data = reference.data.to(dtype)

    def _average(self, pair: _Pair) -> torch.Tensor:
        """Return what is averaged: the reference itself, or its shadow where its dtype is too coarse."""
        name, _, reference = pair
        if name in self._shadows:
            return self._shadows[name]
        if self._mode == "hard" or torch.finfo(reference.dtype).bits >= 32:
            return reference
        # Where ZeRO-3 gathers a parameter it is whole, as is the shadow: too large for the device it is sharded on.
        device = torch.device("cpu") if _is_zero3(reference) else reference.device
        self._shadows[name] = reference.to(device, torch.float32)
        return self._shadows[name]

    def _write(self, pairs: Sequence[_Pair], decay: float) -> None:
        averages = [self._average(pair) for pair in pairs]
        new = [pair.policy.to(each.device, each.dtype) for pair, each in zip(pairs, averages, strict=True)]
        if decay:
            steps = torch._foreach_sub(new, averages)  # type: ignore[reportPrivateImportUsage]
            # Rounds less than a sum of two products.
            torch._foreach_add_(averages, steps, alpha=1 - decay)  # type: ignore[reportPrivateImportUsage]
        else:
            _copy(averages, new)
        coarse = [
            (pair.reference, each) for pair, each in zip(pairs, averages, strict=True) if each is not pair.reference
        ]
        if coarse:
            _copy(*map(list, zip(*coarse, strict=True)))

    def _compared(self, pairs: Sequence[_Pair]) -> torch.Tensor:
        """Sum of the squares of all differences, and the number of those that are not 0."""
        held = [self._shadows[pair.name] if pair.name in self._narrowed else pair.reference for pair in pairs]
        policy = _joined([pair.policy.to(each.device, each.dtype) for pair, each in zip(pairs, held, strict=True)])
        reference = _joined(held)
        sums = [(policy - reference).float().square().sum(), (policy != reference).sum()]
        sums = [each.full_tensor() if isinstance(each, DTensor) else each for each in sums]
        return torch.stack([in_double(each) for each in sums])


def _copy(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if len(to) == 1:  # as those that are sharded come, for which the other is not defined
        to[0].copy_(values[0])
    else:
        torch._foreach_copy_(to, values)  # type: ignore[reportPrivateImportUsage]


def _members(pairs: Sequence[_Pair]) -> list[torch.Tensor]:
    return [each for pair in pairs for each in (pair.policy, pair.reference)]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])


def _ensure_reference_adapter(policy: PeftModel) -> None:
    """Add the adapter "ref", a copy of "default" that does not train, if it is not there yet."""
    if _POLICY_ADAPTER not in policy.peft_config:
        raise SettingsError(
            f"A policy with adapters must have one with the name {_POLICY_ADAPTER!r}, as TRL trains that one; this has "
            f"{sorted(policy.peft_config)}. Load or make it with `adapter_name={_POLICY_ADAPTER!r}`."
        )
    is_new = _REFERENCE_ADAPTER not in policy.peft_config
    if is_new:
        _add_adapter(policy)
    parameters = dict(policy.named_parameters())
    for name, parameter in parameters.items():
        counterpart = parameters.get(_reference_name(name) or "")
        if counterpart is None:
            continue
        counterpart.requires_grad_(False)
        # TRL's copy has left out what ends in the name of the adapter, as the factors of an embedding do.
        if is_new or f".{_POLICY_ADAPTER}." not in name:
            counterpart.data = parameter.data.clone()
    for name, module in policy.named_modules():
        if name.rpartition(".")[2] == _REFERENCE_ADAPTER:
            disable_dropout_in_model(module)


def _add_adapter(policy: PeftModel) -> None:
    config = copy.deepcopy(policy.peft_config[_POLICY_ADAPTER])
    # These take the adapter's first weights out of the base model, which has been done. Those of a copy do not matter.
    if isinstance(config, LoraConfig) and str(config.init_lora_weights).lower().startswith(_BASE_CHANGING):
        config.init_lora_weights = True
    requires_grad = {name: parameter.requires_grad for name, parameter in policy.named_parameters()}
    devices = {parameter.device for parameter in policy.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        policy.add_adapter(_REFERENCE_ADAPTER, config)
    # PEFT 0.18 freezes all that is not an adapter when one is added, such as a value head.
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(requires_grad.get(name, False))


def _reference_factors(policy: PeftModel) -> Generator[nn.Module]:
    """Yield the factors of the adapter "ref" that activations are multiplied with, which is what autocast casts."""
    for layer in policy.modules():
        if isinstance(layer, lora.Linear) and _REFERENCE_ADAPTER not in layer.lora_variant:
            for factors in (layer.lora_A, layer.lora_B):
                if _REFERENCE_ADAPTER in factors:
                    yield factors[_REFERENCE_ADAPTER]


def _adapter_names(policy: PeftModel) -> dict[str, str]:
    parameters = _parameters(policy)
    names = {name: _reference_name(name) or name for name in _trained(parameters)}
    if missing := [name for name, other in names.items() if other == name or other not in parameters]:
        raise SettingsError(
            f"The policy trains {_listed(missing)}, which the adapter {_REFERENCE_ADAPTER!r} does not have: the reference "
            "would change with it at once. Freeze it, or train it as one of `modules_to_save`."
        )
    return names


def _shared_names(policy: nn.Module, reference: nn.Module) -> dict[str, str]:
    ours, theirs = _parameters(policy), _parameters(reference)
    for here, there, place in ((ours, theirs, "reference"), (theirs, ours, "policy")):
        if missing := [name for name in here if name not in there and not _is_of_value_head(name)]:
            raise SettingsError(
                f"The {place} has no parameter {_listed(missing)}. Policy and reference must be of one architecture."
            )
    return {name: name for name in _trained(ours)}


def _trained(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    return [name for name, parameter in parameters.items() if parameter.requires_grad and not _is_of_value_head(name)]


def _reference_name(name: str) -> str | None:
    """Name of the counterpart in the adapter "ref" of a parameter of the adapter "default"."""
    parts = name.split(".")
    if _POLICY_ADAPTER not in parts:
        return None
    last = len(parts) - 1 - parts[::-1].index(_POLICY_ADAPTER)
    return ".".join([*parts[:last], _REFERENCE_ADAPTER, *parts[last + 1 :]])


def _is_of_value_head(name: str) -> bool:
    return "value_head" in name


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters, by the names they have in a model without wrappers."""
    return {_plain(name): parameter for name, parameter in model.named_parameters()}


def _slots(model: nn.Module) -> dict[str, _Slot]:
    """Return where the parameters are kept, by the same names."""
    return {
        _plain(f"{prefix}.{leaf}" if prefix else leaf): _Slot(owner, leaf)
        for prefix, owner in model.named_modules()
        for leaf in owner._parameters
    }


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # some are left whole after a forward pass: stale to read, and not kept if written


def _plain(name: str) -> str:
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPERS)


def _key(name: str) -> str:
    # Not the name itself: a server that reads every file of a folder would take these for the policy's weights.
    return f"reference.{name}"


def _listed(names: Mapping[str, object] | set[str] | list[str]) -> str:
    first, *others = sorted(names)
    return f"{first!r}" + (f" (and {len(others)} more)" if others else "")


def _placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


def _is_main() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _is_zero3(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "ds_id")


@contextmanager
def _whole(parameters: Sequence[torch.Tensor], is_changed: bool = True) -> Generator[bool]:
    """Parameters that DeepSpeed has split put together, and whether this process is to write them."""
    if not any(map(_is_zero3, parameters)):
        yield True
        return
    import deepspeed  # type: ignore[reportMissingImports]

    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if is_changed else None):
        yield _is_main()
