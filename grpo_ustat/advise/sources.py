"""Choice of the kind of advice: the content of the paths decides what advice is possible."""

from __future__ import annotations

from dataclasses import replace

from grpo_ustat.advise.compare import compared_advice
from grpo_ustat.advise.kinds import Kind, kind_of
from grpo_ustat.advise.request import Request, address_of
from grpo_ustat.advise.rewards import reward_advice
from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.pages.advice import Advice
from grpo_ustat.runs.files import RESULT

# Kinds of sources that have rewards by prompt, so that `reward=` and `cluster=` apply.
REWARD_KINDS = (Kind.COMPLETIONS, Kind.REWARDS, Kind.ROLLOUTS)


def advice_of(request: Request) -> Advice:
    """Return the advice that the sources support; several sources are compared."""
    size, rollouts = request.num_generations, request.rollouts
    if size is not None and rollouts is not None and rollouts >= size and rollouts % size:
        fewer = rollouts // size * size
        raise ConfigError(
            f"num_generations={size} does not divide rollouts={rollouts}: use rollouts={fewer} or "
            f"rollouts={fewer + size}"
        )
    sources = [request.source, *request.others]
    kinds = [kind_of(source) for source in sources]
    if all(kind is Kind.SCALARS for kind in kinds):
        return _from_scalars(request)
    _check_options(request, kinds[0])
    if len(kinds) == 1:
        return _from_one(request, kinds[0])
    if all(kind in REWARD_KINDS for kind in kinds):
        return compared_advice(request, kinds)
    if all(kind is Kind.RUN for kind in kinds):
        runs = f"runs=[{','.join(map(str, sources))}]"
        raise ConfigError(
            f"advise compares only logs of rollouts, rewards or scalars, but {len(sources)} run "
            f"folders are named: compare them with {command_line('report', runs)}"
        )
    shown = ", ".join(
        f"{address_of(x)} ({kind.value})" for x, kind in zip(sources, kinds, strict=True)
    )
    raise ConfigError(
        f"logs of different kinds cannot be compared: {shown}. Name a log of the same kind for "
        "each run"
    )


def _from_one(request: Request, kind: Kind) -> Advice:
    """Return advice from a single source that is not a log of scalars."""
    if kind in REWARD_KINDS:
        return reward_advice(request, kind)
    # Imported here, because this module needs the packages of a study, such as torch. Advice from a
    # log must work without them.
    from grpo_ustat.advise.runs import pool_advice, run_advice

    if kind is Kind.POOL:
        return pool_advice(request)
    source = request.source
    folder = source.parent if source.name == RESULT else source
    return run_advice(replace(request, source=folder))


def _from_scalars(request: Request) -> Advice:
    """Return advice from the scalars of one or several runs."""
    from grpo_ustat.advise.scalars import scalar_advice
    from grpo_ustat.logs.scalars import read_all_scalars

    if request.model is not None:
        raise ConfigError(
            f"model={request.model} needs completions, but {request.address} has only scalars: "
            "name a log of rollouts, or leave out model="
        )
    _check_options(request, Kind.SCALARS)
    runs = read_all_scalars([request.address, *map(address_of, request.others)])
    return scalar_advice(runs, request.num_generations, request.rollouts)


def _check_options(request: Request, kind: Kind) -> None:
    """Refuse options that have no effect on a source of this kind."""
    if kind in REWARD_KINDS:
        return
    for name in ("reward", "cluster"):
        if getattr(request, name) is not None:
            raise ConfigError(
                f"{name}={getattr(request, name)} names a column, but {request.address} is a "
                f"{kind.value}: leave it out"
            )
