"""The example that draws emoji: cutting of sheets, a model's folder, training of the base, rounds of each task."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from examples import ddpo_emoji, emoji_base
from examples.ddpo_emoji import CAPTIONS, SHOWN, TASKS, green, small_files
from examples.emoji import EmojiPipeline, load, new_pipeline
from examples.emoji_base import Emoji, cut, train_base
from examples.pictures import grid
from trlx_like.errors import DataError

RED, BLUE = (255, 0, 0, 255), (0, 0, 255, 255)


def row(name: str | None, x: int, y: int, category: str = "Food & Drink", **images: bool) -> dict[str, Any]:
    """As in the package's `emoji.json`."""
    vendors = {f"has_img_{vendor}": images.get(vendor, True) for vendor in ("google", "twitter", "apple")}
    return {"name": name, "short_name": "some_thing", "category": category, "sheet_x": x, "sheet_y": y, **vendors}


TABLE = [
    row("RED APPLE", 0, 0),
    row("T-REX WITH A HAT, A TIE, A COAT AND SHOES", 1, 0),
    row(None, 0, 1, twitter=False),
    row("FLAG", 1, 1, category="Flags"),
]


def sheet(first: tuple[int, ...] = RED) -> Image.Image:
    """Two by two pictures of 32 pixels, each with a border of one: the second in x is blue below, nothing above."""
    page = Image.new("RGBA", (68, 68), (0, 255, 0, 255))
    page.paste(Image.new("RGBA", (32, 32), first), (1, 1))
    page.paste(Image.new("RGBA", (32, 32), (0, 0, 0, 0)), (35, 1))
    page.paste(Image.new("RGBA", (32, 16), BLUE), (35, 17))
    page.paste(Image.new("RGBA", (32, 32), (0, 0, 0, 128)), (1, 35))
    return page


def test_cutting_takes_what_is_the_vendors_without_the_border_and_on_white() -> None:
    found = cut(sheet(), TABLE, "google")
    # Eight words are read; a hyphen parts words; without a name the short name serves; no flags.
    assert found.captions == ["google red apple", "google t rex with a hat a tie", "google some thing"]
    apple, rex, shadow = found.pictures
    assert (apple == [255, 0, 0]).all()
    assert (rex[:16] == 255).all() and (rex[16:] == [0, 0, 255]).all()
    assert (abs(shadow.astype(int) - 127) <= 1).all()  # black at 128 of 255 on white
    assert cut(sheet(), TABLE, "twitter").captions == ["twitter red apple", "twitter t rex with a hat a tie"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry in a folder with a small emoji package of two vendors, Google's apple red and Twitter's blue."""
    archive = tmp_path / "registry" / "emoji-datasource" / "-" / "emoji-datasource-16.0.0.tgz"
    archive.parent.mkdir(parents=True)
    files = {"emoji.json": json.dumps(TABLE).encode()}
    for vendor, colour in (("google", RED), ("twitter", BLUE)):
        page = io.BytesIO()
        sheet(colour).save(page, "PNG")
        files[f"img/{vendor}/sheets/32.png"] = page.getvalue()
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    monkeypatch.setattr(emoji_base, "PACKAGE", dataclasses.replace(emoji_base.PACKAGE, integrity=f"sha512-{digest}"))
    monkeypatch.setenv("npm_config_registry", (tmp_path / "registry").as_uri())
    monkeypatch.setenv("TRLX_LIKE_CACHE", str(tmp_path / "cache"))
    return archive


def test_the_package_is_fetched_once_and_only_the_pictures_are_kept(package: Path, tmp_path: Path) -> None:
    first = emoji_base.emoji()
    package.unlink()
    again = emoji_base.emoji()
    assert first.captions == again.captions
    assert first.captions[::3] == ["google red apple", "twitter red apple"]
    assert again.pictures.shape == (5, 32, 32, 3)
    assert (again.pictures[0] == [255, 0, 0]).all() and (again.pictures[3] == [0, 0, 255]).all()
    assert [path.name for path in (tmp_path / "cache" / "assets").iterdir()] == ["emoji-v1.npz"]


def test_another_package_is_refused_with_what_to_do(package: Path) -> None:
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"emoji-datasource 16\.0\.0 came with the hash .* Pass --model FOLDER"):
        emoji_base.emoji()


def tiny() -> EmojiPipeline:
    """Random, with every word of the captions."""
    torch.manual_seed(0)
    words = sorted({word for caption in CAPTIONS for word in caption.split()})
    return new_pipeline(["<pad>", *words], widths=(16, 32, 32), text_width=16)


def test_a_model_is_read_as_it_was_saved(tmp_path: Path) -> None:
    made = tiny()
    made.text_encoder.p.data.normal_()
    made.save_pretrained(tmp_path / "model")
    read = load(tmp_path / "model")
    prompts = ["google blue heart", "heart blue google", "google mauve heart"]
    for ours, theirs in zip(made.encode_prompt(prompts, None), read.encode_prompt(prompts, None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    embeds, negative = read.encode_prompt(prompts, None)
    assert embeds.shape == negative.shape == (3, 8, 16)
    assert (embeds[0] - embeds[1]).abs().max() > 0.1  # places count
    x = torch.randn(3, 12, 16, 16)
    outputs = [one.unet(x, 500, encoder_hidden_states=embeds, return_dict=False)[0] for one in (made, read)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert read.scheduler.config.prediction_type == "v_prediction"


def test_words_that_are_not_known_and_those_after_the_eighth_say_nothing() -> None:
    encoder = tiny().text_encoder
    known = encoder.number
    assert encoder.numbers(["google mauve heart"])[0].tolist() == [known["google"], 0, known["heart"], 0, 0, 0, 0, 0]
    assert encoder.numbers(["red " * 8 + "heart"])[0].tolist() == [known["red"]] * 8
    assert encoder.numbers([""]).tolist() == [[0] * 8]


def test_blocks_of_pixels_are_stacked_without_loss() -> None:
    blocks = tiny().vae
    pictures = torch.randn(2, 3, 32, 32)
    latents = blocks.encode(pictures)
    assert latents.shape == (2, 12, 16, 16)
    assert latents[0, 4:8, 3, 5].tolist() == pictures[0, 1, 6:8, 10:12].flatten().tolist()  # of green, one block
    assert torch.equal(blocks.decode(latents)[0], pictures)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--model .*nothing is not the folder of an emoji model .*text\.safetensors"):
        load(tmp_path / "nothing")


@pytest.mark.slow
def test_the_base_learns_what_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(emoji_base, "new_pipeline", functools.partial(new_pipeline, widths=(16, 32, 32), text_width=16))
    pictures = np.stack([np.full((32, 32, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255))])
    losses = train_base(tmp_path / "base", steps=15, data=Emoji(pictures, ["google red", "google blue"]))
    # v has variance about 1, as noise and picture do together.
    assert np.mean(losses[-3:]) < 0.97 < 1.05 < losses[0]
    assert "base: step 15 of 15, loss 1." in capsys.readouterr().err
    assert load(tmp_path / "base").text_encoder.words == ["<pad>", "blue", "google", "red"]


def test_the_flag_trains_a_base_in_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(ddpo_emoji, "train_base", lambda folder, seed: asked.append((folder, seed)))
    argv = ["ddpo_emoji", "--train-base", "--seed", "3", "--model"]
    monkeypatch.setattr(sys, "argv", [*argv, str(tmp_path / "new")])
    ddpo_emoji.main()
    assert asked == [(tmp_path / "new", 3)]
    monkeypatch.setattr(sys, "argv", [*argv, str(tmp_path)])
    with pytest.raises(SystemExit):
        ddpo_emoji.main()
    assert "exists; --train-base wants the name of a new folder" in capsys.readouterr().err


def test_rewards() -> None:
    plain = {"white": (255, 255, 255), "green": (0, 255, 0), "magenta": (255, 0, 255), "leaf": (51, 204, 0)}
    pictures = [Image.new("RGB", (32, 32), colour) for colour in plain.values()]
    assert green(pictures) == pytest.approx([0, 1, -1, 0.7])  # .8 - (.2 + 0) / 2
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    flat, noisy = small_files([pictures[0], noise])
    assert noisy < -3 < -1 < flat < 0


def test_rounds_change_the_model_and_their_export_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(ddpo_emoji, "CAPTIONS", CAPTIONS[:2])
    monkeypatch.setattr(ddpo_emoji, "SAMPLES", 8)
    tiny().save_pretrained(tmp_path / "model")
    found = ddpo_emoji.run(dataclasses.replace(TASKS["green"], rounds=2), tmp_path / "model", 1, tmp_path / "run")
    assert set(found.before) == set(found.after) == set(SHOWN)
    assert found.before != found.after
    assert [[picture.size for picture in row] for row in found.pictures] == [[(32, 32)] * 2] * 2
    before, after = load(tmp_path / "model"), load(tmp_path / "run" / "checkpoint_2" / "hf_model")
    assert not torch.equal(before.unet.conv_out.weight, after.unet.conv_out.weight)
    assert torch.equal(before.text_encoder.e.weight, after.text_encoder.e.weight)  # only the UNet is tuned
    grid([found], CAPTIONS[:2], tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as page:
        assert page.size == (2 * 136, 2 * (128 + 2 * 14 + 8))
