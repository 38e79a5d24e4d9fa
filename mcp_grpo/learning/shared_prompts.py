"""Passes through a model in which what several rows begin with is run once."""

import inspect
from collections.abc import Callable
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mcp_grpo.errors import SettingsError
from mcp_grpo.learning.padding import PER_TOKEN, Unpadded
from mcp_grpo.trl_compat import TREE_ATTENTION, attention_name, use_attention


SHARE_PROMPTS: bool | None = None  # `False` never does; `True` refuses a model that cannot
MIN_SHARED = 16  # tokens: fewer are not worth a branch
MIN_SAVED = 0.15  # of the tokens of a pass: with fewer, rows as they are take as long
# How far a log-probability of a tree may be off in the trial of a model, in standard deviations; the last, in other types.
TOLERANCE, COARSE = {torch.float64: 1e-2, torch.float32: 1e-2}, 0.2


class _Row(NamedTuple):
    """A row of a pass: where its first token is in the flattened rows, its tokens, and those that it may share."""

    place: int
    num_tokens: int
    prefix: np.ndarray


class Segment(NamedTuple):
    """Tokens of a tree, from `start` to `end`: they follow each other, and those of the segments in `path`."""

    start: int
    end: int
    path: tuple["Segment", ...]

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Return where the tokens are that these attend to."""
        return [(each.start, each.end) for each in (*self.path, self)]


class PromptTree:
    """
    Rows without padding, one after the other: what they have in common first and once, then what each has for itself.

    Completions are never shared, nor the last token of a prompt, which predicts the first one of its completion.

    Args:
        input_ids (`torch.Tensor` of shape `(B, L)`):
            The rows.
        attention_mask (`torch.Tensor` of shape `(B, L)`):
            1 for tokens; those of a row are contiguous.
        num_tokens (`int` or `torch.Tensor` of shape `(B,)`):
            Columns of the completions, at the end; where they are of different widths, those of each row.

    Attributes:
        num_padded (`int`):
            How many tokens the rows are with padding, if that begins in the first column.
        segments (`list[Segment]`):
            All tokens, in order.
        places (`torch.Tensor`):
            Index of each token in the flattened rows; of a shared one, in one of its rows.
        positions (`torch.Tensor`):
            Position of each token in its row.
        own (`torch.Tensor`):
            Indices of the tokens that are of one row only.
    """

    def __init__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_tokens: int | torch.Tensor) -> None:
        ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy()
        lasts = (ids.shape[1] - torch.as_tensor(num_tokens).expand(len(ids)) - 1).tolist()  # of the prompts
        starts = range(0, ids.size, ids.shape[1])
        rows = [
            _Row(start + begin, length, row[begin : max(begin, last)])
            for start, row, begin, length, last in zip(
                starts, ids, mask.argmax(axis=1), mask.sum(axis=1), lasts, strict=True
            )
        ]
        self.num_padded = len(rows) * max(row.num_tokens for row in rows)
        self.segments: list[Segment] = []
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        # In the order of their bytes, those that begin alike are neighbours, and the first and the last differ the most.
        self._grow(sorted(rows, key=lambda row: row.prefix.tobytes()), 0, ())
        joined = (torch.from_numpy(np.concatenate(each)) for each in zip(*self._parts, strict=True))
        places, positions, is_own = joined
        self.places, self.positions, self.own = (
            each.to(input_ids.device) for each in (places, positions, is_own.nonzero().squeeze(1))
        )

    def __len__(self) -> int:
        return self.segments[-1].end if self.segments else 0

    def _grow(self, rows: list[_Row], depth: int, path: tuple[Segment, ...]) -> None:
        """Add sorted rows that agree in their first `depth` tokens, which are in the tree as `path`."""
        common = _num_equal(rows[0].prefix, rows[-1].prefix)
        if len(rows) > 1 and common - depth >= MIN_SHARED:
            path = (*path, self._add(rows[0], depth, common, path, is_own=False))
            depth = common
        for is_branch, branch in groupby(rows, lambda row: tuple(row.prefix[common : common + 1])):
            found = list(branch)
            if is_branch and len(found) > 1:
                self._grow(found, depth, path)
                continue
            for row in found:
                self._add(row, depth, row.num_tokens, path, is_own=True)

    def _add(self, row: _Row, start: int, end: int, path: tuple[Segment, ...], *, is_own: bool) -> Segment:
        """Add the tokens of a row from position `start` to `end`."""
        positions = np.arange(start, end)
        self._parts.append((row.place + positions, positions, np.full(len(positions), is_own)))
        segment = Segment(len(self), len(self) + len(positions), path)
        if len(positions):
            self.segments.append(segment)
        return segment

    @cached_property
    def masks(self) -> list[torch.Tensor | None]:
        """Return for each segment which keys its tokens attend to; `None` where that is plainly causal."""
        found: list[torch.Tensor | None] = []
        for start, end, path in self.segments:
            size, before = end - start, sum(each.end - each.start for each in path)
            mask = torch.ones(size, before + size, dtype=torch.bool, device=self.places.device)
            found.append(mask.tril(before) if path else None)
        return found

    @cached_property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """Return where the keys of each segment are, and the segments as `varlen_attn` takes them."""
        keys = [torch.cat([torch.arange(*each) for each in segment.keys]) for segment in self.segments]
        of_queries, of_keys = [end - start for start, end, _ in self.segments], [len(each) for each in keys]
        device = self.places.device
        ends, key_ends = (
            torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32) for sizes in (of_queries, of_keys)
        )
        return torch.cat(keys).to(device), ends, key_ends, max(of_queries), max(of_keys)


def _num_equal(first: np.ndarray, last: np.ndarray) -> int:
    size = min(len(first), len(last))
    differs = first[:size] != last[:size]
    return int(differs.argmax()) if differs.any() else size


# ---- Attention ----


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    prompt_tree: PromptTree | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as SDPA does; the tokens of a tree, to those before them in their own rows."""
    if prompt_tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if torch.is_autocast_enabled(query.device.type):  # as it does for SDPA
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    attend = _by_kernel if _has_kernel(query.device, query.dtype, query.size(-1)) else _by_segment
    return attend(query, key, value, prompt_tree, scaling), None


@cache
def _varlen_attn() -> Callable[..., Any] | None:
    """Return torch's attention for sequences of different lengths, causal from the lower right, where there is one."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters  # which are not the same in all versions
    how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return partial(varlen_attn, **how, **({"enable_gqa": True} if "enable_gqa" in known else {}))


@cache
def _has_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether that attention can be used."""
    is_new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    is_fit = dtype in (torch.bfloat16, torch.float16) and head_size <= 256 and head_size % 8 == 0
    return is_new and is_fit and _varlen_attn() is not None


def _by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: PromptTree, scaling: float | None
) -> torch.Tensor:
    """Attend with one kernel for all segments, on a copy of the keys of each."""
    attend = cast("Callable[..., torch.Tensor]", _varlen_attn())
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    keys, *lengths = tree.lengths
    return attend(query, key[keys], value[keys], *lengths, scale=scaling)[None]


def _by_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: PromptTree, scaling: float | None
) -> torch.Tensor:
    """Attend segment by segment."""
    num_alike = query.size(1) // key.size(1)
    if query.device.type != "cpu":  # where, with a mask, there is no fast path for heads that share keys
        key, value = (each.repeat_interleave(num_alike, dim=1) for each in (key, value))
    found = []
    for segment, mask in zip(tree.segments, tree.masks, strict=True):
        keys, values = (torch.cat([each[:, :, a:b] for a, b in segment.keys], dim=2) for each in (key, value))
        queries = query[:, :, segment.start : segment.end]
        found.append(
            scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=keys.size(1) != queries.size(1),
            )
        )
    return torch.cat(found, dim=2).transpose(1, 2).contiguous()


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)


# ---- Passes ----


class SharedPrompts:
    """
    Calls a model on rows as a [`PromptTree`], where that saves enough, and else calls `otherwise`, as [`Unpadded`] is.

    Outputs are put back to where they were asked for, and equal those of the rows up to rounding, as do gradients. The model
    must attend by [`tree_attention`]. It stands in for the model in one call of TRL's `_get_per_token_logps_and_entropies`;
    `num_tokens` is the width of the completions. Without it, as in TRL's `SFTTrainer`, a completion begins with the first label of its row.
    """

    def __init__(self, model: Any, otherwise: Any, num_tokens: int | None = None) -> None:
        self._model = model
        self._otherwise = otherwise
        self._num_tokens = num_tokens

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        num_values: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the model on the rows, with what they share once; return its output as for the padded rows."""
        num_tokens = self._num_tokens
        if num_tokens is None:
            num_tokens = labels.size(1) - (labels != -100).int().argmax(dim=1).cpu()
        tree = PromptTree(input_ids, attention_mask, num_tokens)
        # The load of experts is counted by token.
        if len(tree) > (1 - MIN_SAVED) * tree.num_padded or kwargs.get("output_router_logits"):
            values = {} if num_values is None else {"num_values": num_values}
            rows = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
            return self._otherwise(**rows, **values, **kwargs)
        return self.pack(tree, input_ids, labels, num_values, **kwargs)

    def pack(
        self, tree: PromptTree, input_ids: torch.Tensor, labels: torch.Tensor, num_values: int | None, **kwargs: Any
    ) -> Any:
        """Call the model on a tree."""
        if num_values is not None:
            kwargs["num_values"] = len(tree)
        output = self._model(
            input_ids=input_ids.flatten()[tree.places][None],
            attention_mask=torch.zeros(1, 1, 1, 1, device=input_ids.device),  # or a model makes one
            position_ids=tree.positions[None],
            # Nothing predicts the first token of a row.
            labels=labels.flatten()[tree.places].masked_fill(tree.positions == 0, -100)[None],
            prompt_tree=tree,
            **kwargs,
        )
        own = tree.own
        for name in PER_TOKEN:
            if (found := getattr(output, name, None)) is not None:
                # That of a token stands one before it.
                found = torch.cat([found[:, -1:], found], dim=1)
                setattr(output, name, _put_back(found[0, own], tree.places[own], input_ids.shape)[:, 1:])
        if num_values is not None and getattr(output, "value_preds", None) is not None:
            values = _put_back(output.value_preds[0, own], tree.places[own], input_ids.shape)
            output.value_preds = values[:, -num_values:]
        return output


def _put_back(found: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return found.new_zeros(shape.numel()).index_copy(0, places, found).view(shape)


# ---- Which models can ----


class PromptSharing:
    """
    Knows of the models of a run whether they can run what rows share once, and says why where they cannot.

    Args:
        is_wanted (`bool`, *optional*):
            Share, or raise; never share; or with `None`, share where it is possible. `SHARE_PROMPTS` if not given.
    """

    def __init__(self, *is_wanted: bool | None) -> None:
        [self._is_wanted] = is_wanted or [SHARE_PROMPTS]
        self._can: dict[int, bool] = {}
        self.reason: str | None = None  # why the last model that could not cannot

    @property
    def sentence(self) -> str | None:
        """Return what was found out about the models so far."""
        if self.reason is not None:
            return f"Prompts are run once for each attempt: {self.reason}"
        return (
            "Prompts are run once for all attempts in a pass that share them: in a trial, the model gave the same log-probabilities."
            if self._can
            else None
        )

    def is_possible(self, model: Any) -> bool:
        """Return whether a model shares; the first time, on all processes together, try it."""
        if self._is_wanted is False:
            self.reason = "`SHARE_PROMPTS` is `False`."
            return False
        bare = getattr(model, "module", model)
        if id(bare) not in self._can:
            is_compiled = any(hasattr(each, "_orig_mod") for each in model.modules())
            reason = "the model is compiled." if is_compiled else refusal(bare) or _trial(model, bare)
            self._can[id(bare)] = reason is None
            if reason and self._is_wanted:
                raise SettingsError(f"`SHARE_PROMPTS` is `True`, which cannot be: {reason} Leave it at `None`.")
            self.reason = reason or self.reason
        return self._can[id(bare)]


def refusal(model: Any) -> str | None:
    """Say why a model cannot run a [`PromptTree`], as far as its configuration tells."""
    config = model.config
    attention = attention_name(model)
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"})
    if config.get_text_config() is not config:
        return "the model reads more than text."
    if any(each.is_prompt_learning for each in getattr(model, "peft_config", {}).values()):
        return "the adapter puts tokens of its own before each row."
    if attention not in ("sdpa", TREE_ATTENTION):
        return f'attention is "{attention}", and only "sdpa" can be replaced (`attn_implementation`).'
    if kinds:
        return f"the model has layers of {' and '.join(kinds)}."
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None:
        return "the model attends in a sliding window."
    if getattr(config, "attention_dropout", 0):
        return "attention has dropout (`attention_dropout` of the model's configuration)."
    return None


@torch.no_grad()
def _trial(model: Any, bare: Any) -> str | None:
    """Let a model attend by trees, and compare what it says of one with what it says of its rows. Say what is wrong."""
    before = attention_name(bare)
    shared = torch.arange(3 * MIN_SHARED) * 37 % 101
    prompts = [shared, shared, torch.cat([shared[:MIN_SHARED], shared.flip(0)[: 2 * MIN_SHARED]])]
    ends = [torch.arange(size) * 29 % 97 for size in (7, 4, 9)]
    size = len(shared) + 9
    ids, mask = torch.zeros(3, size, dtype=torch.long), torch.zeros(3, size, dtype=torch.long)
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        ids[row, : len(prompt) + len(end)] = torch.cat([prompt, end])
        mask[row, : len(prompt) + len(end)] = 1
    device = bare.get_input_embeddings().weight.device
    ids, mask = ids.to(device) % bare.config.vocab_size, mask.to(device)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : len(shared)] = -100
    was_training = bare.training
    use_attention(bare.eval(), TREE_ATTENTION)
    try:
        rows = Unpadded(model)
        tree = PromptTree(ids, mask, size - len(shared))
        expected = rows(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
        found = (
            SharedPrompts(model, rows, size - len(shared)).pack(tree, ids, labels, None, fused_lm_head=True).log_probs
        )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        use_attention(bare, before)
        return f"the model cannot run a tree of prompts ({type(error).__name__}: {error})."
    finally:
        bare.train(was_training)
    is_label = labels[:, 1:] != -100
    off = (found - expected)[is_label].abs().max() / expected[is_label].std()
    is_autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if is_autocast else bare.get_input_embeddings().weight.dtype
    if not off <= TOLERANCE.get(dtype, COARSE):
        use_attention(bare, before)
        return f"the model gives other log-probabilities for a tree of prompts, by {off:.1e} standard deviations."
    return None
