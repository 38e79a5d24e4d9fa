"""On a CPU, keys and values of what all rows of a batch begin with, once for all of them, and attention that reads them once."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mcp_grpo.trl_compat import attends_by_sdpa, attention_name, attention_with_logsumexp, use_attention


_NAME = "shared_prefix"  # of the attention, where a model is told which to use
_SPARE = 64  # tokens that there is room for when a row's own keys are moved to a larger place, at least
# How far logits may be off in the trial of a model, in the mean square and in standard deviations; the last, in other types.
_TOLERANCE, _COARSE = {torch.float64: 1e-3, torch.float32: 1e-3}, 0.2
_present: ContextVar["SharedPrefixCache | None"] = ContextVar("present", default=None)
_can: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class SharedPrefixCache(DynamicCache):
    """
    Keys and values of rows that begin with the same tokens.

    What they share is kept once; what each has of its own grows in place. Only attention within [`SharedPrefixCache.attending`] knows how to
    read it: to others, the shared part does not show.

    Args:
        shared (`DynamicCache`):
            That of the shared tokens, one row of full attention.
    """

    def __init__(self, shared: DynamicCache) -> None:
        super().__init__()
        layers: list[Any] = shared.layers
        self.layers = [_Layer(each.keys, each.values) for each in layers]
        self._mask: torch.Tensor | None = None  # of the pass under way, and what was made of it
        self._bias: torch.Tensor | None = None

    @contextmanager
    def attending(self, model: Any) -> Generator[None]:
        """Let a model attend to what is in here."""
        before, token = attention_name(model), _present.set(self)
        use_attention(model, _NAME)
        try:
            yield
        finally:
            use_attention(model, before)
            _present.reset(token)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float | None
    ) -> torch.Tensor:
        """
        Attend from `(rows, heads, new tokens, size)`: to the shared tokens, for all rows at once, and to the rows' own, as one softmax over both.

        Heads that share keys are further queries of one head: no key is copied for them.
        """
        rows, heads, num_new, size = query.shape
        num_heads = key.size(1)
        num_alike = heads // num_heads
        shared_key, shared_value = self.layers[layer].shared
        folded = query.to(key.dtype).reshape(rows, num_heads, num_alike * num_new, size)
        together = folded.transpose(0, 1).reshape(1, num_heads, -1, size)
        of_shared, weight_of_shared = (
            each.view(num_heads, rows, num_alike * num_new, -1).transpose(0, 1)
            for each in attention_with_logsumexp(together, shared_key, shared_value, None, scaling)
        )
        bias = self._bias_of(mask, num_new, key.size(2), num_alike, key.dtype)
        of_own, weight_of_own = attention_with_logsumexp(folded, key, value, bias, scaling)
        share = torch.sigmoid(weight_of_shared - weight_of_own.unsqueeze(-1))
        found = torch.lerp(of_own, of_shared, share.to(key.dtype)).to(query.dtype)
        return found.reshape(rows, heads, num_new, size).transpose(1, 2).contiguous()

    def _bias_of(
        self, mask: torch.Tensor | None, num_new: int, num_own: int, num_alike: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return what is added to the scores of the rows' own tokens; once for all layers of a pass."""
        if mask is None and num_new == 1:
            return None
        if mask is None or mask is not self._mask:
            latest = torch.arange(num_own - num_new, num_own).unsqueeze(1)
            own = torch.arange(num_own)
            allowed = own <= latest if mask is None else mask[..., -num_own:]
            # Padding attends to itself, as nothing else is left to it: nobody reads it, but it has to be a number.
            allowed = allowed.expand(-1 if mask is not None else 1, 1, num_new, num_own) | (own == latest)
            bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf)
            self._mask, self._bias = mask, bias.repeat(1, 1, num_alike, 1)
        return self._bias


class _Layer(DynamicLayer):
    def __init__(self, keys: Any, values: Any) -> None:
        super().__init__()
        self.shared: tuple[torch.Tensor, torch.Tensor] = (_wide(keys), _wide(values))
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None
        self._num_own = 0

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Add keys and values of new tokens, and return those of all tokens that are not shared."""
        start, self._num_own = self._num_own, self._num_own + key_states.size(-2)
        if self._room is None or self._num_own > self._room[0].size(-2):
            self._room = self._more_room(key_states, start), self._more_room(value_states, start, 1)
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start : self._num_own] = states
        self.keys, self.values = (room[:, :, : self._num_own] for room in self._room)
        self.is_initialized = True
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return how many tokens a row has."""
        return self.shared[0].size(-2) + self._num_own

    def _more_room(self, states: torch.Tensor, num_kept: int, which: int = 0) -> torch.Tensor:
        rows, heads, _, size = states.shape
        dtype = self.shared[which].dtype
        room = states.new_empty(rows, heads, max(self._num_own + _SPARE, 2 * num_kept), size, dtype=dtype)
        if self._room is not None:
            room[:, :, :num_kept] = self._room[which][:, :, :num_kept]
        return room


def _wide(states: torch.Tensor) -> torch.Tensor:
    """Return states in 32 bits at least: here that takes no longer, and softmax over two parts rounds twice."""
    return states if states.dtype == torch.float64 else states.float()


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    cache = _present.get()
    if cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if unknown := sorted(name for name in ("position_bias", "softcap", "s_aux") if kwargs.get(name) is not None):
        raise ValueError(f"attention has {' and '.join(unknown)}")
    return cache.attend(module.layer_idx, query, key, value, attention_mask, kwargs.get("scaling")), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def shares_prefix(model: Any) -> bool:
    """Return whether a model can sample with a [`SharedPrefixCache`]; the first time, try it."""
    if model.device.type != "cpu":
        return False
    if model not in _can:
        config = model.config
        kinds = getattr(config, "layer_types", None)
        is_full = all(kind == "full_attention" for kind in kinds or ())
        is_plain = config.get_text_config() is config and not getattr(config, "attention_dropout", 0)
        has_window = kinds is None and getattr(config, "sliding_window", None) is not None
        is_fit = is_full and is_plain and not has_window and attends_by_sdpa(model)
        _can[model] = is_fit and _trial(model)
    return _can[model]


@torch.no_grad()
def _trial(model: Any) -> bool:
    """Run rows with padding in the middle, as they are and step by step with such a cache, and compare what the model says of them."""
    num_shared, end = 5, 10
    ids = torch.arange(3 * end).view(3, end) * 37 % 101 % model.config.vocab_size
    ids[:, :num_shared] = ids[0, :num_shared]
    mask = torch.ones_like(ids)
    mask[1, num_shared : num_shared + 2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    was_training = model.training
    model.eval()
    try:
        expected = model(**inputs, use_cache=False, logits_to_keep=3).logits.float()
        cache, found = SharedPrefixCache(shared_cache(model, ids[:1, :num_shared])), list[torch.Tensor]()
        with cache.attending(model):
            for columns in (slice(num_shared, end - 2), slice(end - 2, end - 1), slice(end - 1, end)):
                new = {name: value[:, columns] for name, value in inputs.items()} | {
                    "attention_mask": mask[:, : columns.stop]
                }
                found.append(model(**new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.float())
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        model.train(was_training)
    off = (torch.cat(found, dim=1) - expected).square().mean().sqrt() / expected.std()
    is_autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_autocast else model.get_input_embeddings().weight.dtype
    return bool(off <= _TOLERANCE.get(dtype, _COARSE))


def shared_cache(model: Any, ids: torch.Tensor) -> DynamicCache:
    """Compute keys and values of shared tokens, in one row."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache
