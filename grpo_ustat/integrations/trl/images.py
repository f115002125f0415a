"""Images of a row in a generation batch, in TRL's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grpo_ustat.config.schema import ConfigError

# Model inputs with one entry per image on the first axis.
BY_IMAGE = ("image_grid_thw", "image_sizes", "image_position_ids")
# Model inputs with one entry per token.
BY_TOKEN = ("token_type_ids", "mm_token_type_ids")


def row_images(output: Mapping[str, Any], row: int) -> dict[str, torch.Tensor]:
    """Return the model's image inputs for a row, on the CPU, for `completion_scores`.

    TRL concatenates the images of a batch in row order, and row i has `num_images[i]` images; see
    TRL's `_get_per_token_logps_and_entropies`. All rows of a group have the same images. The result
    is empty if the row has no images.

    Args:
        output: result of `_generate_and_score_completions`.
        row: index of the row on this rank.
    """
    if "pixel_values" not in output:
        return {}
    counts = output["num_images"]
    first, last = sum(counts[:row]), sum(counts[: row + 1])
    if first == last:
        return {}
    width, real = output["prompt_ids"].shape[1], output["prompt_mask"][row].bool()
    images: dict[str, torch.Tensor] = {}
    for name in BY_TOKEN:
        if name in output:
            types_T = output[name][row]
            if types_T[width:].any():
                raise ConfigError(
                    "a tool put images into a completion, so the images within the completion's "
                    "group differ. Such a group cannot be measured: let tools return text"
                )
            images[name] = types_T[:width][real]
    for name in BY_IMAGE:
        if name in output:
            images[name] = output[name][first:last]
    pixels, by_row = output["pixel_values"], slice(row, row + 1)
    if "image_grid_thw" in output:
        # The first axis has the patches of all images, one image after the other.
        sizes = output["image_grid_thw"].prod(dim=-1)
        start = int(sizes[:first].sum())
        place = slice(start, start + int(sizes[first:last].sum()))
    elif "num_tiles" in output:
        # The first axis has the tiles of all images, one image after the other.
        start = sum(output["num_tiles"][:row])
        place = slice(start, start + output["num_tiles"][row])
    elif pixels.dim() == 5 or len(pixels) != sum(counts):
        # The first axis has one entry per row, in which the images are padded to the same number.
        place = by_row
    else:
        place = slice(first, last)
    images["pixel_values"] = pixels[place]
    tiles = "spatial_shapes" in output
    if tiles:
        images["spatial_shapes"] = output["spatial_shapes"][place]
    if "pixel_attention_mask" in output:
        images["pixel_attention_mask"] = output["pixel_attention_mask"][place if tiles else by_row]
    return {name: value.cpu() for name, value in images.items()}
