"""A row's images are cut out of a batch as TRL cuts them out."""

from __future__ import annotations

import pytest
import torch
from trl_room import output_of

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl.images import row_images

COUNTS = [1, 0, 2]  # images of three rows


def batch(**changes):
    """Three rows, prompts of 2, 3 and 4 tokens."""
    output = output_of([[1, 2], [1, 2, 3], [1, 2, 3, 4]], [[5], [5, 6], [5, 6, 7]])
    return output | {"num_images": COUNTS} | changes


def numbered(*shape):
    return torch.arange(torch.tensor(shape).prod()).view(shape).float()


def types(*rows):
    """Of left-padded prompts of 4 columns and completions of 3."""
    return torch.tensor([[0] * (4 - len(row)) + row + [0] * 3 for row in rows])


GRID = torch.tensor([[1, 2, 2], [1, 2, 3], [1, 2, 1]])
PATCHES, IMAGES, PADDED, TILES = (
    numbered(12, 5),
    numbered(3, 3, 2),
    numbered(3, 2, 3, 2, 2),
    numbered(6, 4),
)
KINDS = {  # what TRL hands out, and what is of the third row
    "patches": (
        {"pixel_values": PATCHES, "image_grid_thw": GRID,
         "mm_token_type_ids": types([1, 0], [0, 0, 0], [0, 1, 1, 0])},
        {"pixel_values": PATCHES[4:], "image_grid_thw": GRID[1:],
         "mm_token_type_ids": torch.tensor([0, 1, 1, 0])},
    ),
    "images": (
        {"pixel_values": IMAGES, "image_sizes": GRID[:, 1:],
         "token_type_ids": types([1, 0], [0, 0, 0], [0, 1, 1, 0])},
        {"pixel_values": IMAGES[1:], "image_sizes": GRID[1:, 1:],
         "token_type_ids": torch.tensor([0, 1, 1, 0])},
    ),
    "padded": (
        {"pixel_values": PADDED, "pixel_attention_mask": PADDED[:, :, 0] > 3},
        {"pixel_values": PADDED[2:], "pixel_attention_mask": PADDED[2:, :, 0] > 3},
    ),
    "tiles": ({"pixel_values": TILES, "num_tiles": [2, 0, 4]}, {"pixel_values": TILES[2:]}),
    "masked tiles": (
        {"pixel_values": TILES, "num_tiles": [2, 0, 4], "spatial_shapes": TILES[:, :2],
         "pixel_attention_mask": TILES > 3},
        {"pixel_values": TILES[2:], "spatial_shapes": TILES[2:, :2],
         "pixel_attention_mask": TILES[2:] > 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_a_row(kind):
    given, expected = KINDS[kind]
    found = row_images(batch(**given), 2)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert row_images(batch(**given), 1) == {}


def test_images_of_a_padded_prompt():
    """Token types are of its own tokens."""
    found = row_images(batch(**KINDS["patches"][0]), 0)
    assert found["mm_token_type_ids"].tolist() == [1, 0]
    assert torch.equal(found["pixel_values"], PATCHES[:4])


def test_a_batch_without_images():
    assert row_images(batch(), 0) == {}


def test_images_in_completions_are_refused():
    given = dict(KINDS["patches"][0])
    given["mm_token_type_ids"] = given["mm_token_type_ids"].clone()
    given["mm_token_type_ids"][2, 5] = 1
    with pytest.raises(ConfigError, match="a tool put images into a completion"):
        row_images(batch(**given), 2)
