"""DeepSpeed's ZeRO stage 1 (Rajbhandari et al. 2020): the optimizer's state in shards, one a rank.

Weights and gradients are whole on every rank, so gradients are formed, summed, measured and clipped
as on replicas (`update`): ranks may have unequal work and may form a gradient again. DeepSpeed then
takes this rank's part of the sum, moves its own part of the weights and gathers all parts.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import parse_flag_from_env
from accelerate.utils.imports import is_deepspeed_available

from grpo_ustat.distributed.ranks import RefusedByRank, is_main
from grpo_ustat.policy.loading import Policy

DEEPSPEED_VARIABLE = "ACCELERATE_USE_DEEPSPEED"
SHIPPED_FILE = "grpo_ustat/launch/accelerate/deepspeed.yaml"
ENGINE_OPTIONS = {
    "train_micro_batch_size_per_gpu": 1,  # required; only DeepSpeed's own data loading uses it
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,  # else to a norm of 1; max_grad_norm is ours
    "zero_optimization": {
        "stage": 1,
        "contiguous_gradients": False,  # with them, and with overlap, it reduces in every pass
        "overlap_comm": False,
        "compute_grad_norm": False,
    },
}


def check_options() -> None:
    """Refuse what cannot work, before accelerate sets it up; without DeepSpeed nothing happens.

    Raises:
        ConfigError: DeepSpeed is missing, or has options that are not supported here.
    """
    if not parse_flag_from_env(DEEPSPEED_VARIABLE):
        return
    if not is_deepspeed_available():
        raise RefusedByRank(
            "accelerate is configured for DeepSpeed, which is not installed: pip install "
            "deepspeed, or use fsdp2 (launch.accelerate=fsdp2), which shards more and needs "
            "nothing else"
        )
    for name, variable, required in (
        ("deepspeed_config_file", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"),
        ("zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "1"),
        ("offload_optimizer_device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
        ("offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none"),
        ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", "auto"),
    ):
        value = os.environ.get(variable, required)
        if value != required:
            raise RefusedByRank(
                f"accelerate's {name}={value} is not supported: DeepSpeed shards the optimizer's "
                f"state alone here (zero_stage=1), without more options, as {SHIPPED_FILE} says; "
                "fsdp2 shards weights and gradients too, and max_grad_norm is ours"
            )


def is_configured() -> bool:
    """Whether accelerate launched the ranks with DeepSpeed, as `SHIPPED_FILE` says."""
    return parse_flag_from_env(DEEPSPEED_VARIABLE) and dist.is_initialized()


class ZeroOptimizer:
    """An optimizer of which every rank holds a part; used as torch's own.

    Args:
        policy: its parameters become views of one flat tensor.
        optimizer: over the policy's trained parameters; afterwards over this rank's part of them.

    Raises:
        ConfigError: the weights are not float32.
    """

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer):
        (group,) = optimizer.param_groups
        self._optimizer, self._parameters = optimizer, list(group["params"])
        dtype = self._parameters[0].dtype
        if dtype != torch.float32:
            raise RefusedByRank(
                f"DeepSpeed keeps weights in float32 for its updates, asked is {dtype}: use "
                "model.dtype=float32 (and bf16=true), or launch.accelerate=ddp or fsdp2"
            )
        os.environ.setdefault("DS_ACCELERATOR", policy.model.device.type)  # else a GPU if any
        import deepspeed  # optional: without the package, pyright takes this module for it

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self._engine = deepspeed.initialize(  # pyright: ignore[reportAttributeAccessIssue]
            model=policy.model, optimizer=optimizer, config=ENGINE_OPTIONS, dist_init_required=False
        )[0]
        self._zero = self._engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the wrapped optimizer: one, with its learning rate."""
        return self._optimizer.param_groups

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._zero.zero_grad()

    def step(self) -> None:
        """Move the weights along gradients that are sums over ranks already; on all ranks at once.

        The gradients are forgotten.
        """
        self._zero.independent_gradient_partition_epilogue()  # takes this rank's part
        self._zero.step()

    def moments(self, names: list[str]) -> dict[str, torch.Tensor]:
        """The full state as `parameter/field`, on rank 0's CPU; on all ranks at once.

        Args:
            names: of the trained parameters, in their order.
        """
        from deepspeed.utils import (  # pyright: ignore[reportMissingImports]
            safe_get_full_optimizer_state,
        )

        result = {}
        (part,) = self.param_groups[0]["params"]
        for name, parameter in zip(names, self._parameters, strict=True):
            for field, value in self._optimizer.state[part].items():
                if value.ndim:  # a collective
                    value = safe_get_full_optimizer_state(parameter, field)
                if is_main():
                    result[f"{name}/{field}"] = value.cpu().clone()
        return result

    def load_moments(self, names: list[str], entries: dict[str, torch.Tensor]) -> None:
        """Restore this rank's part of what `moments` returned; its weights are the current ones."""
        from deepspeed.utils import (  # pyright: ignore[reportMissingImports]
            safe_set_full_optimizer_state,
        )

        self._zero.refresh_fp32_params()
        (part,) = self.param_groups[0]["params"]
        for key, value in entries.items():  # every parameter has the same fields
            field = key.rpartition("/")[2]
            like = torch.zeros_like(part) if value.ndim else value.to(part.device)
            self._optimizer.state[part].setdefault(field, like)
        self._zero._lazy_init_hp_params_optimizer_state()  # each parameter's view of it
        for name, parameter in zip(names, self._parameters, strict=True):
            for field, like in self._optimizer.state[part].items():
                if like.ndim:
                    value = entries[f"{name}/{field}"].to(part.device)
                    safe_set_full_optimizer_state(parameter, value, field)
