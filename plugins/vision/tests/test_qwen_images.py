"""Images in messages become the tokens and patches that the processor makes; bad images are one sentence."""

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from generator.config import GeneratorConfig, check_request
from ownloop_tasks.tools import ToolEnv
from ownloop_vision.image_prompts import content_hash
from ownloop_vision.qwen_images import file_bytes, pixels
from ownloop_vision.tiny_vl import IMAGE_TOKEN, tiny_qwen2_5_vl, tiny_qwen3_vl
from plugins.tasks.tests.test_tools import Sums, call
from plugins.vision.tests.vision import WORDS, image_datum, parts, photo, picture
from rl.checks import prompt_fault
from rl.data.batching import validate_batch
from rl.data.sources import JsonlExamples, examples_to_data
from rl.images import images_of
from rl.protocols import Observation
from rl.rollouts.columns import groups_to_table, parquet_bytes, table_to_groups
from rl.rollouts.episodes import rollout_to_datum
from rl.rollouts.rendering import Renderer, prompt_text
from rl.system.hf_config import inspect_model, is_tied, read_config
from rl.tiny_models import tiny_qwen3
from rl.types import Completion, Group, Rollout, SamplingParams, Turn


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("models") / "vl", WORDS)


def test_nested_settings_describe_the_language_model(model: Path, tmp_path: Path) -> None:
    info = inspect_model(model)
    assert info.architecture == "Qwen3VLForConditionalGeneration"
    settings = read_config(model)
    assert (settings["hidden_size"], settings["num_hidden_layers"], is_tied(settings)) == (64, 2, False)
    assert inspect_model(tiny_qwen2_5_vl(tmp_path / "vl", WORDS)).vocab_size == info.vocab_size


def test_an_image_is_as_many_tokens_as_it_has_features(model: Path) -> None:
    renderer = Renderer(model)
    one = renderer.encode(parts("what"))
    tokens = renderer.encode(parts("what", (64, 96), "red", (32, 32)))
    shown = renderer._tokenizer.convert_ids_to_tokens(tokens)  # pyright: ignore[reportPrivateUsage]
    assert shown.count(IMAGE_TOKEN) == 6 + 1
    assert images_of(one) == ()
    for image in images_of(tokens):
        assert set(shown[image.start : image.start + image.num_tokens]) == {IMAGE_TOKEN}
        assert (shown[image.start - 1], shown[image.start + image.num_tokens]) == ("<|vision_start|>", "<|vision_end|>")


def test_patches_are_those_of_the_models_processor(model: Path) -> None:
    (image,) = images_of(Renderer(model).encode(parts((80, 50))))
    made = Qwen2VLImageProcessorPil.from_pretrained(model)(images=[picture(80, 50)])
    assert np.array_equal(image.inputs["pixel_values"], made["pixel_values"])
    assert np.array_equal(image.inputs["image_grid_thw"], made["image_grid_thw"][0])
    assert Image.open(io.BytesIO(image.data)).tobytes() == picture(80, 50).tobytes()


def test_every_form_of_an_image_is_the_same(model: Path, tmp_path: Path) -> None:
    data = file_bytes(picture(32, 64))
    path, url = tmp_path / "picture.png", as_url(picture(32, 64))
    path.write_bytes(data)
    forms = [data, path, str(path), url, {"bytes": data, "path": None}]
    assert [file_bytes(form) for form in forms] == [data] * len(forms)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_as_their_exif_says(tmp_path: Path, orientation: int) -> None:
    path, data = tmp_path / "photo.jpg", photo(32, 64, orientation)
    path.write_bytes(data)
    expected = load_image(str(path))
    assert expected.size == ((64, 32) if orientation < 5 else (32, 64))
    for each in (data, file_bytes(Image.open(path))):
        assert np.array_equal(np.asarray(pixels(each)), np.asarray(expected))


def test_a_photo_with_broken_exif_stays_as_it_is() -> None:
    data = photo(32, 64, 6)
    broken = data.replace(b"Exif\0\0MM", b"Exif\0\0??")
    assert broken != data
    assert pixels(broken).tobytes() == pixels(photo(32, 64, 1)).tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "F", "I"])
def test_images_of_every_mode_become_rgb(mode: str) -> None:
    image = Image.new("RGB", (4, 4), (200, 40, 90)).convert("L" if mode in ("F", "I") else mode).convert(mode)
    assert np.array_equal(np.asarray(pixels(file_bytes(image))), np.asarray(image.convert("RGB")))


@pytest.mark.stranger("2.D6")
@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *(("RGBA", form) for form in ("PNG", "WEBP", "GIF", "TIFF", None)),
        *(("LA", form) for form in ("PNG", "WEBP", "TIFF", None)),
        *(("P", form) for form in ("PNG", "WEBP", None)),
        *(("L", form) for form in ("PNG", "GIF", None)),
        ("RGBa", None),
    ],
)
def test_what_is_transparent_is_on_white(mode: str, form: str | None) -> None:
    alpha = Image.new("L", (8, 8))
    alpha.paste(255, (4, 0, 8, 8))
    image = Image.new("RGB", (8, 8), (0, 0, 0)).convert("LA" if mode == "LA" else "RGBA")
    image.putalpha(alpha)
    if mode == "P":
        image = image.quantize(2)
    elif mode == "L":  # a grey is declared transparent
        image = alpha.point(lambda value: 0 if value else 9)
        image.info["transparency"] = 9
    else:
        image = image.convert(mode)
    file = io.BytesIO()
    if form:
        image.save(file, form)
    read = np.asarray(pixels(file.getvalue() if form else file_bytes(image)))
    assert (read[:, :4] == 255).all()
    assert (read[:, 4:] == 0).all()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("form", ["PNG", "TIFF", None])
def test_grey_of_16_bits_is_scaled_to_8(order: str, form: str | None) -> None:
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16)  # 257 times each is white's 65535 at 255
    image = Image.fromarray((257 * grey).astype(f"{order}u2"))
    file = io.BytesIO()
    if form:
        image.save(file, form)
    read = np.asarray(pixels(file.getvalue() if form else file_bytes(image)))
    assert np.array_equal(read, np.repeat(grey[..., None], 3, axis=2))


@pytest.mark.parametrize("values", [np.array([[0.0, 0.5], [0.75, 1.0]], np.float32), np.array([[0, 65535]], np.int32)])
def test_grey_of_an_unknown_range_is_refused(values: Any) -> None:
    image, file = Image.fromarray(values), io.BytesIO()
    image.save(file, "TIFF")
    for read in (lambda: file_bytes(image), lambda: pixels(file.getvalue())):
        with pytest.raises(
            ValueError, match=r"mode '[FI]' has pixels from 0.* to .*; they must be whole numbers from 0"
        ):
            read()


def test_replies_and_given_answers_may_follow_images(model: Path) -> None:
    renderer = Renderer(model)
    reply = renderer.encode_reply(parts((32, 32), "red"), (3,))
    assert [image.num_tokens for image in images_of(reply)] == [1]
    prompt = parts("what", (64, 64))
    assert renderer.encode_completion(prompt, "red") == renderer.encode_completion(parts("what"), "red")
    assert prompt_text(prompt) == " what [image]"


def test_a_tool_may_return_an_image(model: Path) -> None:
    env = ToolEnv(env=Sums(), tools=("plugins.tasks.tests.test_tools:echo",))
    shown = [{"type": "image", "image": as_url(picture(64, 64))}, {"type": "text", "text": " red "}]

    async def asked(value: Any) -> Any:
        episode = await env.train_problems(0, 0, 1)[0].start()
        observed = await episode.reply(call("echo", value=value))
        assert isinstance(observed, Observation)
        return observed.messages[0]

    message = asyncio.run(asked(shown))
    assert message == {"role": "tool", "content": shown}
    (image,) = images_of(Renderer(model).encode_reply([message], (3,)))
    assert image.data == file_bytes(picture(64, 64))
    for other in ([{"type": "text", "text": "red"}], [{"type": "image"}], [1, 2]):
        assert asyncio.run(asked(other))["content"] == json.dumps(other)


def as_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(file_bytes(image)).decode()}"


def test_an_image_token_that_a_user_spells_out_is_text(model: Path) -> None:
    renderer = Renderer(model)
    tokens = renderer.encode(parts(f"what {IMAGE_TOKEN} red", (64, 64)))
    assert [image.num_tokens for image in images_of(tokens)] == [4]
    with pytest.raises(ValueError, match="the chat template shows 2 images and the prompt has 1; it must show each"):
        renderer.encode([{"role": "system", "content": f"what {IMAGE_TOKEN}"}, *parts((64, 64))])


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (file_bytes(picture(64, 64))[:-900], "an image of .* bytes is broken: "),
        (b"no image", "an image of 8 bytes is in no format that Pillow knows"),
        ("https://example.org/a.png", "'https://example.org/a.png'; addresses are not fetched: give the bytes of"),
        ("missing.png", "the image missing.png cannot be read: No such file or directory"),
        ("data:image/png,abc", "a data URL must be 'data:image/png;base64,' and the file in base64"),
        (3, "an image is a int; it must be the bytes of an image file, a path, a data URL, or an image of Pillow"),
    ],
)
def test_bad_images_are_refused_in_a_sentence(model: Path, image: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Renderer(model).encode([{"role": "user", "content": [{"type": "image", "image": image}]}])


def test_a_truncated_jpeg_is_refused() -> None:
    file = io.BytesIO()
    picture(64, 64).save(file, "JPEG")
    assert pixels(file.getvalue()).size == (64, 64)
    with pytest.raises(ValueError, match=r"is broken: .*truncated"):
        pixels(file.getvalue()[:-500])


def test_images_need_a_model_and_a_processor(tmp_path: Path) -> None:
    text = tiny_qwen3(tmp_path / "text")
    template = {"chat_template": "{% for m in messages %}w3 {% endfor %}"}
    settings = text / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | template))
    with pytest.raises(ValueError, match=r"the prompt has an image, and .*text is a model of text"):
        Renderer(text).encode(parts((32, 32)))
    without = tiny_qwen3_vl(tmp_path / "vl", WORDS)
    (without / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"has neither preprocessor_config\.json nor processor_config\.json, by which"):
        Renderer(without).encode(parts((32, 32)))
    assert Renderer(without).encode(parts("red"))


def test_an_image_larger_than_the_context_is_refused(model: Path, tmp_path: Path) -> None:
    prompt, sampling = Renderer(model).encode(parts((256, 256))), SamplingParams(max_tokens=4)
    assert len(prompt) == 64 + 7
    with pytest.raises(ValueError, match=r"a prompt of 71 tokens and max_tokens=4 need 75 tokens; the generator's con"):
        check_request(prompt, sampling, 1, GeneratorConfig(model=model, max_model_len=48))
    with pytest.raises(ValueError, match=r"batch\[0\].tokens has length 71"):
        validate_batch([image_datum(prompt, [8])], vocab_size=32, max_seq_len=48, reads_images=True)
    with pytest.raises(ValueError, match=r"the prompt has 1 images; .*text is a model of text"):
        check_request(prompt, sampling, 1, GeneratorConfig(model=tiny_qwen3(tmp_path / "text")))


def test_recordings_keep_each_file_once_and_are_read_again(model: Path) -> None:
    renderer = Renderer(model)
    prompt, reply = renderer.encode(parts((64, 96))), renderer.encode_reply(parts((64, 96), "red", (32, 32)), (3,))
    completion = Completion(tokens=(8, 3), logprobs=(-1, -1), versions=(0, 0), text="", finish_reason="stop")
    turns = [Turn(prompt_tokens=tokens, completion=completion) for tokens in (prompt, reply)]
    rollouts = tuple(Rollout(turns=tuple(turns[:count]), reward=float(count)) for count in (1, 2, 2))
    group = Group(problem_id="a", prompt="", rollouts=rollouts)
    table = groups_to_table([group])
    files = [each["file"] for row in table["images"].to_pylist() for each in row]
    assert len(files) == 1 + 3 + 3
    assert [file for file in files if file] == [file_bytes(picture(64, 96, seed=0)), images_of(reply)[1].data]
    (recorded,) = table_to_groups(pq.read_table(pa.BufferReader(parquet_bytes(table))))
    assert recorded == group
    again = renderer.read_again(recorded)
    for found, expected in zip(again.rollouts, rollouts, strict=True):
        for ours, theirs in zip(found.turns, expected.turns, strict=True):
            for one, other in zip(images_of(ours.prompt_tokens), images_of(theirs.prompt_tokens), strict=True):
                assert (one, content_hash(one)) == (other, content_hash(other))
    with pytest.raises(ValueError, match=r"images\[0\].inputs is empty; `Renderer.read_again` reads recorded images"):
        validate_batch([rollout_to_datum(recorded.rollouts[0], 1.0)], vocab_size=32, max_seq_len=64, reads_images=True)
    assert "images" not in groups_to_table([Group(problem_id="a", prompt="", rollouts=())]).column_names


def test_rows_of_a_file_are_told_apart_by_their_images(model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    for number in range(40):
        content = [{"type": "image", "image": as_url(picture(32, 32, seed=number))}, {"type": "text", "text": " what "}]
        lines.append(json.dumps({"prompt": [{"role": "user", "content": content}], "completion": "red"}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    source = JsonlExamples(path=tmp_path / "rows.jsonl")
    train, held_out = source.train_examples(0, 0, 30), source.eval_examples(40)
    assert len({example.id for example in (*train, *held_out)}) == 30 + len(held_out)
    data = examples_to_data(Renderer(model), held_out, train_on="completion", max_tokens=64)
    assert len({content_hash(datum.images[0]) for datum in data}) == len(held_out) > 0


def test_prompts_with_images_pass_the_check_of_prompts() -> None:
    assert prompt_fault(parts("what", (32, 32))) == ""
    for content in ([], [{"type": "image"}], [{"type": "text", "text": 3}], [5]):
        assert "or parts with images" in prompt_fault([{"role": "user", "content": content}])
