"""Passes through a model that sees: rows with and without pictures, and a token of a picture that the policy wrote itself."""

from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.vision import gemma_policy, vision_model, vision_processor
from PIL import Image as Pillow

from mcp_grpo.build import make_vision
from mcp_grpo.learning import Seeing
from mcp_grpo.rollout import Renderer, set_call_format
from mcp_grpo.sampling import Sampling
from mcp_grpo.sampling.transformers_generator import TransformersGenerator, _Request
from mcp_grpo.sampling.vision import Picture, Vision, picture_inputs, type_column
from mcp_grpo.sampling.vllm_generator import _prompt
from mcp_grpo.types import Image


PROCESSOR = vision_processor()
TOKENIZER = PROCESSOR.tokenizer
VISION = Vision(PROCESSOR)
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=end_of_turn_ids("qwen3_vl", TOKENIZER), vision=VISION)
IMAGE_ID = PROCESSOR.image_token_id


def picture(colour: str, size: tuple[int, int] = (24, 16), vision: Vision = VISION) -> Picture:
    file = BytesIO()
    Pillow.new("RGB", size, colour).save(file, "PNG")
    return vision.picture(Image(data=file.getvalue(), mime_type="image/png", note="[p]"))


def prompt(*pictures: Picture, renderer: Renderer = RENDERER) -> tuple[int, ...]:
    opening = renderer.prompt_ids([{"role": "user", "content": "?"}], [])
    message = {"role": "tool", "name": "look", "content": "It is: ", "images": list(pictures)}
    return opening + renderer.suffix_ids([message] if pictures else [{**message, "images": []}])


@torch.no_grad()
def logps(model: Any, ids: tuple[int, ...], pictures: list[Picture]) -> torch.Tensor:
    """Log-probabilities of what follows each token of a row, by Transformers alone."""
    row = torch.tensor([ids])
    inputs = picture_inputs(pictures)
    if pictures:
        inputs[str(type_column(model))] = (row == pictures[0].token_ids[0]).long()
    return model(input_ids=row, attention_mask=torch.ones_like(row), **inputs).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def model() -> Any:
    return vision_model(TOKENIZER)


def check_rows(model: Any, renderer: Renderer, vision: Vision) -> None:
    """Check that a batch of rows with two, no and one picture is sampled and scored as each row by itself."""
    shown = partial(picture, vision=vision)
    rows = [[shown("red"), shown("blue", (40, 40))], [], [shown("green")]]
    generator = TransformersGenerator(
        model, end_of_turn_ids=[*renderer.end_of_turn_ids, *vision.token_ids], pad_token_id=0
    )
    batch = [
        _Request(prompt(*row, renderer=renderer), Sampling(max_tokens=12, seed=seed, pictures=tuple(row)))
        for seed, row in enumerate(rows)
    ]
    turns = generator._generate(batch)
    whole = [request.prompt_ids + turn.token_ids for request, turn in zip(batch, turns, strict=True)]
    width = max(map(len, whole))
    ids = torch.tensor([(0,) * (width - len(row)) + row for row in whole])
    mask = torch.tensor([(0,) * (width - len(row)) + (1,) * len(row) for row in whole])
    with torch.no_grad():
        inputs = picture_inputs([each for row in rows for each in row])
        scored = Seeing(model, vision, filler_id=0)(input_ids=ids, attention_mask=mask, **inputs).logits.log_softmax(
            -1
        )
    for number, (request, row, turn) in enumerate(zip(batch, rows, turns, strict=True)):
        written = torch.tensor(turn.token_ids)[:, None]
        alone = logps(model, request.prompt_ids + turn.token_ids[:-1], row)[len(request.prompt_ids) - 1 :]
        together = scored[number, -len(written) - 1 : -1]
        for found in (alone, together):
            assert torch.tensor(turn.logprobs).sub(found.gather(1, written)[:, 0]).abs().max() < 1e-4


def test_rows_with_many_one_and_no_pictures_are_one_batch(model: Any) -> None:
    check_rows(model, RENDERER, VISION)


@pytest.mark.full
def test_a_family_with_other_inputs_and_without_tools_sees_pictures_all_the_same() -> None:
    policy, processor = gemma_policy()
    tokenizer: Any = processor.tokenizer
    assert set_call_format(tokenizer, "auto", None).name == "json"
    vision = Vision(processor)
    renderer = Renderer(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id], vision=vision)
    assert renderer.vision is vision
    assert not vision.repeats_token
    assert make_vision(trainer_like(processing_class=processor, use_vllm=True))[0] is None
    check_rows(policy, renderer, vision)


def test_a_token_of_a_picture_ends_the_turn_in_which_the_policy_writes_it(model: Any) -> None:
    generator = TransformersGenerator(model, end_of_turn_ids=[*RENDERER.end_of_turn_ids, IMAGE_ID], pad_token_id=0)
    turn = generator._cut(Sampling(max_tokens=9), [5, IMAGE_ID, 6, 7], [0.0] * 4, [0.0] * 4)
    assert turn.token_ids == (5, IMAGE_ID)
    assert turn.finish_reason == "stop"
    assert IMAGE_ID not in RENDERER.end_of_turn_ids  # so that the trajectory ends, too


def test_a_token_of_a_picture_that_the_policy_wrote_is_none(model: Any) -> None:
    shown = [picture("red")]
    own = (*prompt(*shown), 11, 12, IMAGE_ID)
    seen: list[dict[str, Any]] = []

    def watched(**inputs: Any) -> Any:
        seen.append(inputs)
        inputs.pop("labels")
        return model(**inputs)

    seeing = Seeing(model, VISION, filler_id=0)
    seeing._model = watched
    ids = torch.tensor([own, (0,) * 4 + own[: -4 - 3] + (13, 14, 15)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    inputs = picture_inputs([*shown, *shown])
    with torch.no_grad():
        output = seeing(input_ids=ids, attention_mask=mask, labels=ids, **inputs)
    assert seen[0]["input_ids"][0, -1] == 0
    assert seen[0]["mm_token_type_ids"][0, -1] == 0
    expected = logps(model, own[:-1], shown)[-1]
    assert output.logits[0, -2].log_softmax(-1).sub(expected).abs().max() < 1e-4


def test_a_pass_without_pictures_is_one_of_text(model: Any) -> None:
    seen: list[dict[str, Any]] = []
    seeing = Seeing(model, VISION, filler_id=0)
    seeing._model = lambda **inputs: seen.append(inputs)
    empty = {name: value[:0] for name, value in picture_inputs([picture("red")]).items()}
    ids = torch.arange(8)[None]
    seeing(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, **empty)
    assert set(seen[0]) == {"input_ids", "attention_mask", "labels"}


class OtherProcessor(type(PROCESSOR)):
    """A processor of something else."""

    def __init__(self) -> None:
        self.image_processor = None


def trainer_like(**changes: Any) -> Any:
    args = SimpleNamespace(use_vllm=False, vllm_mode="colocate", old_results="keep")
    given = {"processing_class": PROCESSOR, "is_fsdp_enabled": False, "is_deepspeed_enabled": False, **changes}
    for name in ("use_vllm", "vllm_mode", "old_results"):
        setattr(args, name, given.pop(name, getattr(args, name)))
    return SimpleNamespace(args=args, **given)


def test_it_is_said_why_a_policy_that_could_see_is_not_shown_pictures() -> None:
    assert make_vision(trainer_like())[1] is None
    assert make_vision(trainer_like(use_vllm=True))[1] is None
    for changes, reason in (
        ({"use_vllm": True, "vllm_mode": "server"}, "vLLM servers are given text only"),
        ({"old_results": "drop"}, 'set it to "keep"'),
        ({"is_fsdp_enabled": True}, "train with DDP"),
        ({"processing_class": OtherProcessor()}, "has no images"),
    ):
        vision, why = make_vision(trainer_like(**changes))
        assert vision is None
        assert why
        assert reason in why
    assert make_vision(trainer_like(processing_class=family_tokenizer("qwen3"))) == (None, None)


def test_the_same_tokens_with_another_picture_have_other_probabilities(model: Any) -> None:
    red, blue = picture("red"), picture("blue")
    assert prompt(red) == prompt(blue)
    assert logps(model, prompt(red), [red])[-1].sub(logps(model, prompt(red), [blue])[-1]).abs().max() > 0.01


def test_vllm_gets_one_token_for_each_picture() -> None:
    shown = [picture("red"), picture("blue", (40, 40))]
    ids = (*prompt(*shown), 11, IMAGE_ID)
    given = _prompt(ids, shown)
    assert given["prompt_token_ids"].count(IMAGE_ID) == 3  # with one that the policy wrote
    assert [each.size for each in given["multi_modal_data"]["image"]] == [(24, 16), (40, 40)]
    assert [each for each in given["prompt_token_ids"] if each != IMAGE_ID] == [
        each for each in ids if each != IMAGE_ID
    ]
    assert _prompt(ids, []) == {"prompt_token_ids": list(ids)}
