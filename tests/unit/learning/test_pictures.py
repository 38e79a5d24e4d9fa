"""Passes through a model that sees: rows with and without pictures, and a token of a picture that the policy wrote itself."""

from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.vision import vision_model, vision_processor
from PIL import Image as Pillow

from mcp_grpo.build import make_vision
from mcp_grpo.learning import Seeing
from mcp_grpo.rollout import Renderer
from mcp_grpo.sampling import Sampling
from mcp_grpo.sampling.transformers_generator import TransformersGenerator, _Request
from mcp_grpo.sampling.vision import Picture, Vision, picture_inputs
from mcp_grpo.types import Image


PROCESSOR = vision_processor()
TOKENIZER = PROCESSOR.tokenizer
VISION = Vision(PROCESSOR)
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=end_of_turn_ids("qwen3_vl", TOKENIZER), vision=VISION)
IMAGE_ID = PROCESSOR.image_token_id


def picture(colour: str, size: tuple[int, int] = (24, 16)) -> Picture:
    file = BytesIO()
    Pillow.new("RGB", size, colour).save(file, "PNG")
    return VISION.picture(Image(data=file.getvalue(), mime_type="image/png", note="[p]"))


def prompt(*pictures: Picture) -> tuple[int, ...]:
    opening = RENDERER.prompt_ids([{"role": "user", "content": "?"}], [])
    message = {"role": "tool", "name": "look", "content": "It is: ", "images": list(pictures)}
    return opening + RENDERER.suffix_ids([message] if pictures else [{**message, "images": []}])


@torch.no_grad()
def logps(model: Any, ids: tuple[int, ...], pictures: list[Picture]) -> torch.Tensor:
    """Log-probabilities of what follows each token of a row, by Transformers alone."""
    row = torch.tensor([ids])
    inputs = picture_inputs(pictures)
    if pictures:
        inputs["mm_token_type_ids"] = (row == IMAGE_ID).long()
    return model(input_ids=row, attention_mask=torch.ones_like(row), **inputs).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def model() -> Any:
    return vision_model(TOKENIZER)


def test_rows_with_many_one_and_no_pictures_are_sampled_in_one_batch(model: Any) -> None:
    rows = [[picture("red"), picture("blue", (40, 40))], [], [picture("green")]]
    generator = TransformersGenerator(model, end_of_turn_ids=[*RENDERER.end_of_turn_ids, IMAGE_ID], pad_token_id=0)
    batch = [
        _Request(prompt(*row), Sampling(max_tokens=12, seed=seed, pictures=tuple(row)))
        for seed, row in enumerate(rows)
    ]
    for request, row, turn in zip(batch, rows, generator._generate(batch), strict=True):
        found = logps(model, request.prompt_ids + turn.token_ids[:-1], row)[len(request.prompt_ids) - 1 :]
        expected = found.gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
        assert torch.tensor(turn.logprobs).sub(expected).abs().max() < 1e-4


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
    args = SimpleNamespace(use_vllm=False, old_results="keep")
    given = {"processing_class": PROCESSOR, "is_fsdp_enabled": False, "is_deepspeed_enabled": False, **changes}
    for name in ("use_vllm", "old_results"):
        setattr(args, name, given.pop(name, getattr(args, name)))
    return SimpleNamespace(args=args, **given)


def test_it_is_said_why_a_policy_that_could_see_is_not_shown_pictures() -> None:
    assert make_vision(trainer_like())[1] is None
    for changes, reason in (
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
    generator = TransformersGenerator(model, end_of_turn_ids=[*RENDERER.end_of_turn_ids, IMAGE_ID], pad_token_id=0)
    rows = [[picture(colour)] for colour in ("red", "blue")]
    alone = [
        generator._generate([_Request(prompt(*row), Sampling(max_tokens=6, pictures=tuple(row)))])[0] for row in rows
    ]
    assert alone[0].logprobs != alone[1].logprobs
