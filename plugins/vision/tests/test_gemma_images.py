"""Messages with images become the tokens and pixels that Gemma 3's own processor makes."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from ownloop_vision.families import check_gemma3
from ownloop_vision.tiny_vl import tiny_gemma3
from plugins.vision.tests.vision import WORDS, parts, picture
from rl.images import images_of
from rl.rollouts.rendering import Renderer
from trainer.config import TrainerConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma3(tmp_path_factory.mktemp("models") / "gemma", WORDS)


@pytest.mark.parametrize(
    "contents",
    [
        (" what ", (64, 96), " red "),
        ((64, 64),),
        ((64, 64), (32, 100)),
        ((64, 64), "\n", (64, 64), "\nblue\n", (90, 64), "\n\nred"),
    ],
)
def test_tokens_are_those_of_the_whole_text(model: Path, contents: tuple[str | tuple[int, int], ...]) -> None:
    pictures = [picture(*each) for each in contents if not isinstance(each, str)]
    texts = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in contents]
    left = iter(pictures)
    shown = [{**part, "image": next(left)} if part["type"] == "image" else part for part in texts]
    renderer = Renderer(model)
    tokenizer = renderer._tokenizer  # pyright: ignore[reportPrivateUsage]
    processor = Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(model), tokenizer, image_seq_length=4)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": texts}], tokenize=False, add_generation_prompt=True
    )
    expected = tokenizer.encode(
        text.replace(processor.boi_token, processor.full_image_sequence), add_special_tokens=False
    )
    tokens = renderer.encode([{"role": "user", "content": shown}])
    assert [*tokens] == expected
    made = processor.image_processor(images=pictures)["pixel_values"]
    for image, pixels in zip(images_of(tokens), made, strict=True):
        assert set(tokens[image.start : image.start + 4]) == {6}
        assert np.array_equal(image.inputs["pixel_values"], pixels)


def test_images_in_replies_and_alone(model: Path) -> None:
    renderer = Renderer(model)
    reply = renderer.encode_reply(parts((32, 32), "red"), (3,))
    (image,) = images_of(reply)
    assert (reply[image.start - 1], reply[image.start + 4]) == (4, 5)
    alone = renderer._images.alone(picture(32, 32))  # pyright: ignore[reportPrivateUsage]
    assert [*alone] == [6] * 4


def test_what_is_not_supported_is_refused(model: Path, tmp_path: Path) -> None:
    cuts = tiny_gemma3(tmp_path / "cuts", WORDS)
    settings = cuts / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_pan_and_scan": True}))
    with pytest.raises(ValueError, match="do_pan_and_scan is true in the processor's settings, which cuts images"):
        Renderer(cuts).encode(parts((64, 64)))
    published = {"mm_tokens_per_image": 256, "vision_config": {"image_size": 896, "patch_size": 14}}
    check_gemma3(TrainerConfig(), {**published, "sliding_window": 1024})
    with pytest.raises(ValueError, match="mm_tokens_per_image is 256 and sliding_window 128; an image must fit into"):
        check_gemma3(TrainerConfig(), {**published, "sliding_window": 128})
    with pytest.raises(ValueError, match="mm_tokens_per_image is 64, and an image has 4096 patches; vLLM"):
        check_gemma3(TrainerConfig(), {**published, "mm_tokens_per_image": 64})
