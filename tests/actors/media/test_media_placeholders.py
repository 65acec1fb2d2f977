"""Pads of images and videos become the ids that transformers' processors make of them."""

from __future__ import annotations

import random
import types
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from actorium.actors.errors import InvalidRequest
from actorium.actors.media.image_processor import QWEN2, QWEN3
from actorium.actors.media.patch_store import MediaFacts
from actorium.actors.media.prompt_media import (
    END,
    IMAGE,
    PADS,
    START,
    VIDEO,
    expand_ids,
    expand_text,
    patch_times,
    seconds_per_patch,
)

WORDS = ["look", "at this: <", " seconds> 2.5", "and", "\n", "what?", "12.0", "ab<0", "look >"]
ONE_IMAGE, ONE_VIDEO = f"{START}{PADS[IMAGE]}{END}", f"{START}{PADS[VIDEO]}{END}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE that merges across everything that is no special token."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.train_from_iterator(
        ["".join(WORDS) * 3 + "<1.0 seconds><12.5 seconds>", "look<0.3 seconds>and"] * 4,
        trainers.BpeTrainer(vocab_size=330, special_tokens=[START, END, *PADS.values()],
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return found


def processor(family: str, tokenizer: Tokenizer) -> Any:
    """One of transformers' own, but for its image and video processors, which want torchvision."""
    name, kind = {QWEN2: ("qwen2_5_vl", "Qwen2_5_VLProcessor"),
                  QWEN3: ("qwen3_vl", "Qwen3VLProcessor")}[family]
    own = getattr(import_module(f"transformers.models.{name}.processing_{name}"), kind)
    made = own.__new__(own)
    made.tokenizer = import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=tokenizer)
    made.image_token, made.video_token = PADS[IMAGE], PADS[VIDEO]
    made.vision_start_token, made.vision_end_token = START, END
    made.image_processor = made.video_processor = types.SimpleNamespace(
        merge_size=2, temporal_patch_size=2)
    return made


def video_metadata(**facts: Any) -> Any:
    """transformers', which is imported by the tests alone: that takes two seconds."""
    return import_module("transformers.video_utils").VideoMetadata(**facts)


def theirs(own: Any, text: str, media: list[MediaFacts], metadata: list[Any]) -> list[int]:
    """As ProcessorMixin.__call__ goes on once pixels are processed."""
    images = {"image_grid_thw": np.array([m.grid for m in media if not m.video])}
    videos = {"video_grid_thw": np.array([m.grid for m in media if m.video]),
              "video_metadata": metadata}
    expanded, _ = own.get_text_with_replacements(
        [text],
        [own.replace_image_token(images, i) for i in range(len(images["image_grid_thw"]))],
        [own.replace_video_token(videos, i) for i in range(len(metadata))])
    return own.tokenizer(expanded)["input_ids"][0]


def drawn(rng: random.Random, marks: bool) -> tuple[str, list[MediaFacts], list[Any]]:
    """A rendering; without marks videos are bare pads."""
    text, media, metadata = "", [], []
    for _ in range(rng.randint(1, 5)):
        text += "".join(rng.choices(WORDS, k=rng.randint(0, 4)))
        height, width = (2 * rng.randint(1, 5) for _ in range(2))
        if rng.random() < 0.5:
            media.append(MediaFacts(False, (1, height, width)))
            text += ONE_IMAGE
            continue
        indices = sorted(rng.sample(range(900), rng.randint(1, 7)))
        fps = rng.choice([24.0, 29.97, 8.0])
        metadata.append(video_metadata(total_num_frames=900, fps=fps, frames_indices=indices))
        times = patch_times(indices, fps, 2)
        media.append(MediaFacts(True, (len(times), height, width), timestamps=times))
        text += ONE_VIDEO if marks else PADS[VIDEO]
    return text + rng.choice(WORDS), media, metadata


@pytest.mark.parametrize("family, marks", [(QWEN2, True), (QWEN3, False)])
def test_ids_are_those_of_the_processor(tokenizer: Tokenizer, family: str, marks: bool) -> None:
    rng, own = random.Random(family), processor(family, tokenizer)
    pads = [tokenizer.token_to_id(pad) for pad in PADS.values()]
    for _ in range(40):
        text, media, metadata = drawn(rng, marks)
        expanded = expand_text(text, media, family)
        ids, spans = expand_ids(tokenizer.encode(expanded.text).ids, expanded, pads)
        assert ids == theirs(own, text, media, metadata)
        covered = [at for span in spans for at in range(span.offset, span.offset + span.length)]
        assert covered == [at for at, token in enumerate(ids) if token in pads]
        for index, item in enumerate(media):
            assert sum(span.length for span in spans if span.item == index) == item.tokens


def test_marks_around_a_video_of_qwen3_are_replaced_with_it(tokenizer: Tokenizer) -> None:
    """transformers 4.57 and vLLM replace start, pad and end together; 5.23 replaces the pad alone,
    so that its ids have a start and an end too many, and else the same."""
    rng, own = random.Random(1), processor(QWEN3, tokenizer)
    for _ in range(20):
        text, media, metadata = drawn(rng, marks=True)
        bare = text.replace(ONE_VIDEO, PADS[VIDEO])
        expanded = expand_text(text, media, QWEN3)
        assert expanded == expand_text(bare, media, QWEN3)
        pads = [tokenizer.token_to_id(pad) for pad in PADS.values()]
        ids, _ = expand_ids(tokenizer.encode(expanded.text).ids, expanded, pads)
        assert ids == theirs(own, bare, media, metadata)


def test_the_tokenizer_merges_timestamps_with_what_stands_before(tokenizer: Tokenizer) -> None:
    """So that expanding ids alone would not do: the test above can fail."""
    joined = tokenizer.encode("look ><1.0").ids
    assert joined != tokenizer.encode("look >").ids + tokenizer.encode("<1.0").ids


def test_seconds_between_patches_are_those_of_the_processor() -> None:
    taken = list(range(0, 300, 15))
    metadata = video_metadata(total_num_frames=300, fps=30.0, frames_indices=taken)
    assert seconds_per_patch(taken, 300, 30.0, 2) == 2 / metadata.sampled_fps == 1.0


@pytest.mark.parametrize("text, media", [
    ("no pads", [MediaFacts(False, (1, 2, 2))]),
    (ONE_IMAGE, []),
    (ONE_IMAGE * 2, [MediaFacts(False, (1, 2, 2))]),
    (ONE_IMAGE, [MediaFacts(True, (1, 2, 2))]),
])
def test_texts_that_do_not_match_their_media_are_refused(
        text: str, media: list[MediaFacts]) -> None:
    with pytest.raises(InvalidRequest, match="messages: the prompt has") as error:
        expand_text(text, media, QWEN2)
    assert error.value.param == "messages"


@pytest.mark.parametrize("ids", [[1, 2], [1, 7, 2, 7], [1, 7, 8]])
def test_a_tokenizer_that_makes_other_pads_is_refused(ids: list[int]) -> None:
    expanded = expand_text(f"a{ONE_IMAGE}b", [MediaFacts(False, (1, 4, 4))], QWEN2)
    with pytest.raises(InvalidRequest, match="the tokenizer makes other pads"):
        expand_ids(ids, expanded, [7, 8])
    assert expand_ids([1, 7, 2], expanded, [7, 8])[0] == [1, 7, 7, 7, 7, 2]
