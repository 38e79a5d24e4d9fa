"""
Ask what the schema mask costs: its seconds, as a share of those of the training step it belongs to, measured in the same run.

    python benchmarks/mask_cost.py [--tokenizer FOLDER] [--step-rows 64] [--micro-batch 16] [--rounds 3]

Each trajectory is marked as it ends, on one core, while others are still being generated. Once all have ended, the step waits
for what is left: the floors, and what the masks add to the lists and tensors that TRL is given. The limit is one on what the step
waits for; what was done during the rollout, and both together, are printed beside it. The trajectories that end last are marked
with nothing left to generate, so the step also waits for some milliseconds of each of them.

The batch has 512 trajectories of 2,000 tokens: several turns each, with reasoning, tool calls with nested arguments, and tool results,
on a catalogue of 20 tools. No call is made to resemble another, and every round of measuring has trajectories of its own, so
nothing can be remembered from the round before. The grammar of the catalogue is compiled before; the program fails if there is
ever a second one.

The step is TRL's own: `GRPOTrainer` with its loss, its fused LM head, gradient checkpointing and an adapter, on a model of the
shape of Qwen3-0.6B with random weights, from the finished trajectories to the update. It is an update of `--step-rows` rows, 64 in
bfloat16 on a GPU and 2 in float32 on a CPU, and its seconds are scaled up by the number of rows; with `--step-rows 512`, nothing is
scaled. Prompts are short, as the catalogue is left out of them, and sampling is not counted: both would make the step longer and
the share smaller.

Without `--tokenizer`, one is trained on the spot on the texts of such trajectories: byte-level, as Qwen3's is, and with
Qwen3's control tokens. The chat template is Qwen3's in any case. Nothing is downloaded.
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any


os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from mcp_grpo.learning import rollout_columns, token_columns
from mcp_grpo.masking import GrammarRoles, MaskRule, SchemaMask, SyntaxRoles
from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.masking.mask import RolesOf
from mcp_grpo.rollout import Renderer
from mcp_grpo.types import Exchange, ResultKind, Segment, StopReason, Task, ToolCall, ToolResult, Trajectory


NUM_TRAJECTORIES = 512
NUM_TOKENS = 2_000
LIMITS = {"cpu": 0.03, "cuda": 0.01}  # of the step
ADAPTER = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCABULARY_SIZE = 16_000  # of the tokenizer that is trained here; the model has Qwen3's number of columns
MODEL_VOCABULARY_SIZE = 151_936

Schema = dict[str, Any]
TEXT, NUMBER, INTEGER, FLAG = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))


def record(*required: str, **properties: Schema) -> Schema:
    """The schema of an object of these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def several(items: Schema) -> Schema:
    """The schema of a list."""
    return {"type": "array", "items": items}


def one_of(*options: str) -> Schema:
    """The schema of one of several words."""
    return {"type": "string", "enum": list(options)}


PERSON = record("name", "email", name=TEXT, email=TEXT, role=one_of("owner", "reviewer", "guest"))
PERIOD = record("start", "end", start=TEXT, end=TEXT)
ADDRESS = record("street", "city", street=TEXT, city=TEXT, postcode=TEXT, country=one_of("DE", "FR", "PL", "US"))
LINE = record("sku", "quantity", sku=TEXT, quantity=INTEGER, price=NUMBER, note=TEXT)
CONDITION = record("field", "operator", "value", field=TEXT, operator=one_of("eq", "lt", "gt", "like"), value=TEXT)
PAGE = record("limit", limit=INTEGER, cursor=TEXT, descending=FLAG)
TOOLS: dict[str, Schema] = {
    "search_documents": record("query", query=TEXT, filters=several(CONDITION), page=PAGE),
    "search_people": record("query", query=TEXT, department=TEXT, page=PAGE),
    "search_orders": record("filters", filters=several(CONDITION), period=PERIOD, page=PAGE),
    "read_document": record("document_id", document_id=TEXT, first_line=INTEGER, last_line=INTEGER),
    "write_document": record("title", "body", title=TEXT, body=TEXT, authors=several(PERSON), draft=FLAG),
    "get_order": record("order_id", order_id=INTEGER, with_lines=FLAG),
    "get_customer": record("customer_id", customer_id=INTEGER, fields=several(TEXT)),
    "get_stock": record("skus", skus=several(TEXT), warehouse=one_of("berlin", "lyon", "gdansk", "reno")),
    "create_order": record("customer_id", "lines", customer_id=INTEGER, lines=several(LINE), ship_to=ADDRESS),
    "update_order": record("order_id", order_id=INTEGER, lines=several(LINE), ship_to=ADDRESS, express=FLAG),
    "cancel_order": record("order_id", "reason", order_id=INTEGER, reason=TEXT, refund=NUMBER),
    "create_event": record("title", "when", title=TEXT, when=PERIOD, guests=several(PERSON), place=ADDRESS),
    "move_event": record("event_id", "when", event_id=TEXT, when=PERIOD, tell_guests=FLAG),
    "list_events": record("when", when=PERIOD, owner=PERSON, page=PAGE),
    "send_mail": record("to", "subject", "body", to=several(PERSON), subject=TEXT, body=TEXT, urgent=FLAG),
    "list_mail": record(unread=FLAG, sender=TEXT, period=PERIOD, page=PAGE),
    "run_query": record("table", table=TEXT, columns=several(TEXT), where=several(CONDITION), page=PAGE),
    "make_chart": record("kind", "series", kind=one_of("bar", "line", "pie"), series=several(several(NUMBER))),
    "convert_money": record("amount", "to", amount=NUMBER, to=one_of("EUR", "USD", "PLN"), on=TEXT),
    "get_weather": record("city", city=TEXT, days=INTEGER, units=one_of("metric", "imperial")),
}
CATALOGUE = [
    {
        "type": "function",
        "function": {"name": name, "description": name.replace("_", " ").capitalize() + ".", "parameters": parameters},
    }
    for name, parameters in TOOLS.items()
]
PROSE = " ".join(" ".join(topics.values()).split())  # what Python says about itself
SENTENCES = re.findall(r"(?<=[.] )[A-Z][^.|+*`]{20,160}\.(?= )", PROSE)
FAULTS = 0.05  # of the calls: a required argument is missing


@dataclass(frozen=True)
class Turn:
    """What the policy writes in one turn, and what comes back."""

    text: str
    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]


class Author:
    """
    Writes turns.

    Args:
        seed (`int`):
            Seed of what it writes.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def prose(self, num_sentences: int) -> str:
        """Some sentences."""
        return " ".join(self._random.choices(SENTENCES, k=num_sentences))

    def logprobs(self, count: int) -> tuple[float, ...]:
        """Log-probabilities of a policy that is sure of most tokens."""
        return tuple(-self._random.expovariate(2.0) if self._random.random() < 0.2 else -1e-4 for _ in range(count))

    def turn(self) -> Turn:
        """A turn that calls one tool, or two."""
        calls = tuple(self._call() for _ in range(self._random.choice((1, 1, 1, 2))))
        results = tuple(self._result(call) for call in calls)
        written = [json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) for c in calls]
        blocks = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written)
        reasoning, said = self.prose(self._random.randint(2, 8)), self.prose(self._random.randint(0, 2))
        return Turn(f"<think>\n{reasoning}\n</think>\n\n{said + chr(10) if said else ''}{blocks}", calls, results)

    def _call(self) -> ToolCall:
        name = self._random.choice(list(TOOLS))
        arguments = self._value(TOOLS[name])
        if arguments and self._random.random() < FAULTS:
            del arguments[next(iter(arguments))]
        return ToolCall(name=name, arguments=arguments)

    def _result(self, call: ToolCall) -> ToolResult:
        if any(key not in call.arguments for key in TOOLS[call.name]["required"]):
            return ToolResult(text="An argument is missing.", kind=ResultKind.INVALID_ARGUMENTS)
        found = [
            {"id": self._random.randint(1, 99_999), "text": self.prose(1)} for _ in range(self._random.randint(2, 6))
        ]
        return ToolResult(text=json.dumps({"found": found}))

    def _value(self, schema: Schema) -> Any:
        match schema:
            case {"enum": options}:
                return self._random.choice(options)
            case {"type": "object", "properties": properties, "required": required}:
                chosen = {k: v for k, v in properties.items() if k in required or self._random.random() < 0.5}
                return {key: self._value(value) for key, value in chosen.items()}
            case {"type": "array", "items": items}:
                return [self._value(items) for _ in range(self._random.randint(1, 3))]
            case {"type": "integer"}:
                return self._random.randint(1, 99_999)
            case {"type": "number"}:
                return round(self._random.uniform(0, 1000), 2)
            case {"type": "boolean"}:
                return self._random.random() < 0.5
        words = self.prose(1).split()
        return " ".join(words[: self._random.choice((1, 1, 2, 3, 8))])


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer for such texts, with the control tokens of Qwen3."""
    author = Author(seed=-1)
    turns = [author.turn() for _ in range(4000)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [text for turn in turns for text in (turn.text, *(result.text for result in turn.results))]
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[1], pad_token=SPECIAL[2])
    return tokenizer


class Writer:
    """
    Makes trajectories of turns.

    Args:
        renderer (`Renderer`):
            Messages to tokens.
        seed (`int`):
            Seed of what is written.
    """

    def __init__(self, renderer: Renderer, seed: int) -> None:
        self._renderer = renderer
        self._author = Author(seed)
        self._task = Task(task_id=f"task-{seed}", prompt=({"role": "user", "content": "What is left to do?"},))
        self._prompt_ids = renderer.prompt_ids(self._task.prompt, [])

    def trajectory(self) -> Trajectory:
        """A trajectory of exactly `NUM_TOKENS` tokens."""
        segments: list[Segment] = []
        exchanges: list[Exchange] = []
        room = NUM_TOKENS
        for number in range(NUM_TOKENS):
            turn = self._author.turn()
            sampled = self._ids(turn.text + "<|im_end|>")
            replies = [
                {"role": "tool", "name": call.name, "content": result.text}
                for call, result in zip(turn.calls, turn.results, strict=True)
            ]
            suffix = self._renderer.suffix_ids(replies)
            if len(sampled) + len(suffix) + 2 > room:
                break
            segments += [self._segment(sampled), Segment(token_ids=suffix)]
            exchanges += [
                Exchange(call=c, result=r, turn=number) for c, r in zip(turn.calls, turn.results, strict=True)
            ]
            room -= len(sampled) + len(suffix)
        answer = self._ids(self._author.prose(room))[: room - 1] + self._ids("<|im_end|>")
        return Trajectory(
            task=self._task,
            prompt_ids=self._prompt_ids,
            segments=(*segments, self._segment(answer)),
            messages=(),
            exchanges=tuple(exchanges),
            stop_reason=StopReason.ANSWERED,
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._renderer.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _segment(self, token_ids: tuple[int, ...]) -> Segment:
        return Segment(token_ids=token_ids, logprobs=self._author.logprobs(len(token_ids)))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """
    What was found about a way of masking.

    Args:
        name (`str`):
            The way.
        marking (`list[float]`):
            Seconds that marking the trajectories of a batch took, in each round.
        waiting (`list[float]`):
            Seconds that the step waited after that, in each round.
        forced (`float`):
            Share of the sampled tokens that were forced.
        masked (`float`):
            Share of the sampled tokens that were masked.
    """

    name: str
    marking: list[float]
    waiting: list[float]
    forced: float
    masked: float


def measure_mask(
    name: str, roles_of: RolesOf, few: Sequence[Trajectory], batches: Sequence[Sequence[Trajectory]]
) -> Measured:
    """
    Mask batches, one after the other.

    Args:
        name (`str`):
            What the way of masking is called.
        roles_of (`Callable`):
            Tells syntax from choices in a turn.
        few (`Sequence[Trajectory]`):
            Masked first, for nothing: the bytes of a token are looked up once in a run.
        batches (`Sequence[Sequence[Trajectory]]`):
            What is masked.

    Returns:
        [`Measured`]: How long it took.
    """
    mask = SchemaMask(roles_of, MaskRule())
    for trajectory in few:
        mask.mark(trajectory, CATALOGUE)
    marking: list[float] = []
    waiting: list[float] = []
    for batch in batches:
        start = time.perf_counter()
        marked = [mask.mark(trajectory, CATALOGUE) for trajectory in batch]
        marking.append(time.perf_counter() - start)
        without = seconds_of_columns([replace(trajectory) for trajectory in batch])
        start = time.perf_counter()
        done, figures = mask(marked, lambda _: CATALOGUE)
        floors = time.perf_counter() - start
        waiting.append(floors + max(0.0, seconds_of_columns(done) - without))
    forced, masked = (figures[f"mask/{kind}_fraction"] for kind in ("forced", "masked"))
    if not masked.total:
        raise SystemExit(f"Nothing was masked by `{name}`: there was nothing to measure.")
    return Measured(
        name=name,
        marking=marking,
        waiting=waiting,
        forced=forced.total / forced.count,
        masked=masked.total / masked.count,
    )


def seconds_of_columns(trajectories: Sequence[Trajectory]) -> float:
    """How long it takes to make trajectories into what TRL and the loss are given."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    like = torch.zeros(len(trajectories), NUM_TOKENS, dtype=torch.long, device=device)
    start = now()
    rollout_columns(trajectories, filler_id=0)
    token_columns(trajectories, like)
    return now() - start


def now() -> float:
    """Seconds, once a GPU has done what it was told to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(TrainerCallback):
    """Takes the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """See `TrainerCallback`."""
        self._start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """See `TrainerCallback`."""
        self.seconds.append(now() - self._start)


def measure_step(trajectories: Sequence[Trajectory], tokenizer: Any, micro_batch: int) -> float:
    """
    Train on trajectories twice, and take the time of the second update.

    Args:
        trajectories (`Sequence[Trajectory]`):
            The rows of an update.
        tokenizer (`PreTrainedTokenizerBase`):
            Their tokenizer.
        micro_batch (`int`):
            Rows at a time.

    Returns:
        `float`: Seconds.
    """
    is_on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=max(MODEL_VOCABULARY_SIZE, len(tokenizer)),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(shape).to(torch.bfloat16 if is_on_gpu else torch.float32)
    columns = rollout_columns(trajectories, tokenizer.eos_token_id)
    num_micro_batches = len(trajectories) // micro_batch
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            max_steps=2,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=num_micro_batches,
            num_generations=min(8, len(trajectories)),
            max_completion_length=NUM_TOKENS,
            bf16=is_on_gpu,
            dataloader_pin_memory=is_on_gpu,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "What is left to do?"}] * 2 * len(trajectories)),
            processing_class=tokenizer,
            rollout_func=lambda prompts, _: columns,
            peft_config=ADAPTER,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.seconds[-1]


def main() -> None:
    """Measure, print the table, and fail if a mask costs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer with Qwen3's control tokens")
    parser.add_argument("--step-rows", type=int, help="rows of the step; 64 on a GPU, 2 on a CPU")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows at a time on a GPU, a part of those")
    parser.add_argument("--rounds", type=int, default=3, help="batches that are masked")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    console = Console(width=170, highlight=False)

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer) if arguments.tokenizer else train_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    end_of_turn_ids = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    renderer = Renderer(tokenizer, end_of_turn_ids=end_of_turn_ids)
    few = written(renderer, 0, 32)
    batches = [written(renderer, number, NUM_TRAJECTORIES) for number in range(1, arguments.rounds + 1)]

    syntax = SyntaxRoles(tokenizer, end_of_turn_ids=end_of_turn_ids, chat_template=renderer.chat_template)
    masks = [measure_mask("syntax", lambda segment, tools: syntax.roles(segment.token_ids, tools), few, batches)]
    if find_spec("llguidance") is None:
        grammar_note = "`grammar` is left out: `llguidance` is not installed"
    else:
        grammars = TurnGrammars(tokenizer, end_of_turn_ids=end_of_turn_ids)
        start = time.perf_counter()
        grammars.grammar(CATALOGUE)
        compiled = time.perf_counter() - start
        masks.append(measure_mask("grammar", GrammarRoles(grammars), few, batches))
        if grammars.num_compiled != 1:
            raise SystemExit(f"One catalogue took {grammars.num_compiled} grammars; it must be 1.")
        grammar_note = f"grammars compiled: {grammars.num_compiled}, in {compiled:.2f} s, not counted"

    is_on_gpu = torch.cuda.is_available()
    rows = arguments.step_rows or (64 if is_on_gpu else 2)
    measured = measure_step(batches[0][:rows], tokenizer, min(rows, arguments.micro_batch) if is_on_gpu else rows)
    step = measured * NUM_TRAJECTORIES / rows
    limit = LIMITS["cuda" if is_on_gpu else "cpu"]
    shares = {mask.name: statistics.median(mask.waiting) / step for mask in masks}

    table = Table(title=f"What the schema mask costs: {NUM_TRAJECTORIES} trajectories of {NUM_TOKENS:,} tokens")
    for column in (
        "mask",
        "step, s",
        "step waits, s: median (all rounds)",
        "share",
        "limit",
        "",
        "during the rollout, s",
        "share",
        "each, ms",
        "together",
        "forced",
        "masked",
    ):
        table.add_column(column)
    for mask in masks:
        marking = statistics.median(mask.marking)
        table.add_row(
            mask.name,
            f"{step:.1f}",
            listed(mask.waiting),
            f"{shares[mask.name]:.3%}",
            f"{limit:.0%}",
            "PASS" if shares[mask.name] <= limit else "FAIL",
            listed(mask.marking),
            f"{marking / step:.3%}",
            f"{marking / NUM_TRAJECTORIES * 1000:.1f}",
            f"{shares[mask.name] + marking / step:.3%}",
            f"{mask.forced:.0%}",
            f"{mask.masked:.0%}",
        )
    where = torch.cuda.get_device_name() if is_on_gpu else f"CPU, {torch.get_num_threads()} threads"
    scaled = "" if rows == NUM_TRAJECTORIES else f": {rows} rows took {measured:.1f} s, scaled to {NUM_TRAJECTORIES}"
    table.caption = "\n".join(
        [
            f"step on {where}{scaled}",
            f"tokenizer: {arguments.tokenizer or 'trained here'}, {len(tokenizer):,} tokens",
            described(batches),
            grammar_note,
        ]
    )
    console.print(table)
    sys.exit(any(share > limit for share in shares.values()))


def listed(seconds: Sequence[float]) -> str:
    """The median, and all of them."""
    return f"{statistics.median(seconds):.3f} ({', '.join(f'{one:.3f}' for one in seconds)})"


def written(renderer: Renderer, seed: int, count: int) -> list[Trajectory]:
    """Some trajectories."""
    writer = Writer(renderer, seed)
    return [writer.trajectory() for _ in range(count)]


def described(batches: Sequence[Sequence[Trajectory]]) -> str:
    """What trajectories are like."""
    trajectories = [trajectory for batch in batches for trajectory in batch]
    turns = statistics.mean(trajectory.num_turns for trajectory in trajectories)
    calls = statistics.mean(len(trajectory.exchanges) for trajectory in trajectories)
    sampled = statistics.mean(sum(trajectory.sampled_mask) for trajectory in trajectories)
    return f"per trajectory {turns:.1f} turns, {calls:.1f} calls, {sampled:.0f} sampled tokens"


if __name__ == "__main__":
    main()
