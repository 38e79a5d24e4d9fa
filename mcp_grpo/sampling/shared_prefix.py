"""On a CPU, keys and values of what all rows of a batch begin with, once for all of them, and attention that reads them once."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mcp_grpo.trl_compat import attending_by, attends_by_sdpa, attention_name, attention_with_logsumexp


logger = logging.getLogger(__name__)

_NAME = "shared_prefix"  # of the attention, where a model is told which to use
_SPARE = 64  # tokens that there is room for when a row's own keys are moved to a larger place, at least
# How far logits may be off in the trial of a model, in the mean square and in standard deviations; the last, in other types. Where a model is
# further off by itself, with its own cache, up to three times as far.
_TOLERANCE, _COARSE = {torch.float64: 1e-3, torch.float32: 1e-3}, 0.03
_present: ContextVar["SharedPrefixCache | None"] = ContextVar("present", default=None)
_can: WeakKeyDictionary[Any, dict[Any, bool]] = WeakKeyDictionary()  # what came of trials, by what they depend on


class SharedPrefixCache(DynamicCache):
    """
    Keys and values of rows that begin with the same tokens.

    What they share is kept once; what each has of its own grows in place. Only attention within [`SharedPrefixCache.attending`] knows how to
    read it: to others, the shared part does not show. The first pass may bring many tokens for each row, with padding before them;
    each after it brings one.

    Args:
        shared (`DynamicCache`):
            That of the shared tokens, one row of full attention.
    """

    def __init__(self, shared: DynamicCache) -> None:
        super().__init__()
        layers: list[Any] = shared.layers
        self.layers = [_Layer(each.keys, each.values) for each in layers]
        self._mask: torch.Tensor | None = None  # of the pass under way, and what was made of it
        self._made: Any = None

    @contextmanager
    def attending(self, model: Any) -> Generator[None]:
        """Let a model attend to what is in here, on this thread."""
        token = _present.set(self)
        try:
            with attending_by(model, _NAME):
                yield
        finally:
            _present.reset(token)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float | None
    ) -> torch.Tensor:
        """
        Attend from `(rows, heads, new tokens, size)`: to the shared tokens and to the rows' own, as one softmax over both.

        Heads that share keys are further queries of one head: for the shared tokens, no key is copied. New tokens, one for each row,
        are queries of one row. Where there are more, rows come one after another, without their padding: what is made on the way
        is never larger than for the longest.
        """
        rows, heads, num_new, size = query.shape
        shared, num_heads = self.layers[layer].shared, key.size(1)
        query = query.to(key.dtype)
        if num_new == 1:
            folded = query.reshape(rows, num_heads, -1, size)
            together = folded.transpose(0, 1).reshape(1, num_heads, -1, size)
            of_shared, weight_of_shared = (
                each.view(num_heads, rows, heads // num_heads, -1).transpose(0, 1)
                for each in attention_with_logsumexp(together, *shared, scaling)
            )
            bias = self._bias_of(mask, key.size(2), key.dtype)
            of_own = attention_with_logsumexp(folded, key, value, scaling, bias=bias)
            return _merged(of_shared, weight_of_shared.squeeze(-1), *of_own).reshape(rows, 1, heads, size)
        if key.size(2) != num_new:
            raise ValueError("only the first pass may have more than one token for each row")
        found = torch.zeros_like(query)
        for row, start in enumerate(self._starts_of(mask, rows, num_new)):
            some = query[row : row + 1, :, start:]
            folded = some.reshape(1, num_heads, -1, size)
            of_shared, weight_of_shared = attention_with_logsumexp(folded, *shared, scaling)
            own_key, own_value = (
                each[row : row + 1, :, start:].repeat_interleave(heads // num_heads, dim=1) for each in (key, value)
            )
            of_own = attention_with_logsumexp(some, own_key, own_value, scaling, is_causal=True)
            merged = _merged(of_shared.reshape(some.shape), weight_of_shared.reshape(some.shape[:3]), *of_own)
            found[row, :, start:] = merged[0]
        return found.transpose(1, 2).contiguous()

    def _bias_of(self, mask: torch.Tensor | None, num_own: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what is added to the scores of the rows' own tokens, from the latest; once for all layers of a pass."""
        if mask is None:
            return None
        if mask is not self._mask:
            keep = mask[:, None, None, -num_own:]
            bias = None if keep.all() else torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, -torch.inf)
            self._mask, self._made = mask, bias
        return self._made

    def _starts_of(self, mask: torch.Tensor | None, rows: int, num_own: int) -> list[int]:
        """Return how much padding each row has before its own tokens; once for all layers of a pass."""
        if mask is None:
            return [0] * rows
        if mask is not self._mask:
            keep = mask[:, -num_own:]
            if (keep[:, :-1] & ~keep[:, 1:]).any():
                raise ValueError("there is padding after a row's own tokens")
            self._mask, self._made = mask, (~keep).sum(1).tolist()
        return self._made


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
        room = states.new_empty(rows, heads, self._num_own + max(_SPARE, num_kept // 4), size, dtype=dtype)
        if self._room is not None:
            room[:, :, :num_kept] = self._room[which][:, :, :num_kept]
        return room


def _wide(states: torch.Tensor) -> torch.Tensor:
    """Return states in 32 bits at least: here that takes no longer, and softmax over two parts rounds twice."""
    return states if states.dtype == torch.float64 else states.float()


def _merged(
    of_shared: torch.Tensor, weight_of_shared: torch.Tensor, of_own: torch.Tensor, weight_of_own: torch.Tensor
) -> torch.Tensor:
    """Return attention to two parts as attention to both, from what was found in each and the logarithm of its weight."""
    share = torch.sigmoid(weight_of_shared - weight_of_own).unsqueeze(-1)
    return torch.lerp(of_own, of_shared, share.to(of_own.dtype))


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, Any]:
    cache = _present.get()
    if cache is None:  # another thread's pass through the same model
        attend = ALL_ATTENTION_FUNCTIONS[attention_name(module)]
        return attend(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("dropout") or kwargs.get("position_bias") is not None:
        raise ValueError("attention has dropout, or a bias by position")
    found = cache.attend(module.layer_idx, query, key, value, attention_mask, kwargs.get("scaling"))
    return found.to(query.dtype), None


def _mask(*args: Any, mask_function: Any = causal_mask_function, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Return which tokens are no padding, of each row: the cache needs no more, as long as each sees all before it."""
    if _present.get() is None:
        return sdpa_mask(*args, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    if mask_function is not causal_mask_function or kwargs.get("local_size") is not None:
        raise ValueError("attention has a mask of its own")
    return attention_mask


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)


def shares_prefix(model: Any) -> bool:
    """Return whether a model can sample with a [`SharedPrefixCache`]; the first time, try it. Call it as the model will be called."""
    if model.device.type != "cpu" or not (has_lasting_keys(model.config) and attends_by_sdpa(model)):
        return False
    is_autocast = torch.is_autocast_enabled("cpu")
    weights = model.get_input_embeddings().weight.dtype
    dtype = torch.get_autocast_dtype("cpu") if is_autocast else weights
    trials, key = _can.setdefault(model, {}), (dtype, weights, model.training)
    if key not in trials:
        problem = _trial(model, dtype)
        trials[key] = problem is None
        if problem:
            logger.info("What prompts have in common is kept for each row, as the model cannot share it: %s", problem)
    return trials[key]


def has_lasting_keys(config: Any) -> bool:
    """
    Return whether the key of a token depends on nothing after it, and is seen by all after it, so that rows can share it.

    Not where a window or a state forgets, where the length of a text decides how its positions turn, or where positions are of pictures, too.
    """
    kinds = getattr(config, "layer_types", None)
    has_window = kinds is None and getattr(config, "sliding_window", None) is not None
    is_full = all(kind == "full_attention" for kind in kinds or ())
    return is_full and not has_window and config.get_text_config() is config and not _turns_by_length(config)


def _turns_by_length(config: Any) -> bool:
    turns: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [turns, *(each for each in turns.values() if isinstance(each, dict))]
    return any("dynamic" in (name := str(each.get("rope_type"))) or name == "longrope" for each in kinds)


@torch.no_grad()
def _trial(model: Any, dtype: torch.dtype) -> str | None:
    """Run rows with padding in the middle: as they are, and step by step with its own cache and with such a one. Say what is wrong."""
    num_shared, end = 5, 10
    ids = torch.arange(3 * end).view(3, end) * 37 % 101 % model.config.vocab_size
    ids[:, :num_shared] = ids[0, :num_shared]
    mask = torch.ones_like(ids)
    mask[1, num_shared : num_shared + 2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    def by_steps(cache: DynamicCache) -> torch.Tensor:
        found = list[torch.Tensor]()
        for columns in (slice(num_shared, end - 2), slice(end - 2, end - 1), slice(end - 1, end)):
            new = {name: value[:, columns] for name, value in inputs.items()}
            new["attention_mask"] = mask[:, : columns.stop]
            output = model(**new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            found.append(output.logits.float())
        return torch.cat(found, dim=1)

    try:
        expected = model(**inputs, use_cache=False, logits_to_keep=3).logits.float()
        plain = shared_cache(model, ids[:1, :num_shared])
        plain.batch_repeat_interleave(len(ids))
        usual = by_steps(plain)
        cache = SharedPrefixCache(shared_cache(model, ids[:1, :num_shared]))
        with cache.attending(model):
            found = by_steps(cache)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    off, off_by_itself = ((each - expected).square().mean().sqrt() / expected.std() for each in (found, usual))
    if off <= max(_TOLERANCE.get(dtype, _COARSE), 3 * off_by_itself):
        return None
    return f"logits are off by {off:.1e} standard deviations, and by {off_by_itself:.1e} with its own cache."


def shared_cache(model: Any, ids: torch.Tensor) -> DynamicCache:
    """Compute keys and values of shared tokens, in one row."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache
