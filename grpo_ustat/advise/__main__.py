"""`grpo-ustat advise PATH... [num_generations=8]`: advise on the group size, from a log or a run.

The format of a log is recognised by its content, not by its file name. If several paths are given,
each is a run, and the runs are compared.
"""

from __future__ import annotations

import json
import sys

from grpo_ustat.advise.request import parse_request
from grpo_ustat.advise.sources import advice_of
from grpo_ustat.cli.parser import VerbParser
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import tell, wrapped

EXAMPLES = {
    "outputs/train/NAME/seed-0": "run or pool of this package",
    "rollouts/ num_generations=8": "any log of rollouts that convert reads",
    "completions_00010.parquet model=CHECKPOINT": "compute gradients (needs [cli])",
    "rewards.jsonl": 'lines {"prompt_id": "q1", "reward": 1}',
    "rewards.json": 'or {"prompt_id": "q1", "rewards": [1, 0]}',
    "base.csv tuned.csv": "two runs; columns prompt_id,r0,r1,...",
    "trainer_state.json": "TRL, or metrics.jsonl (verl, prime-rl)",
    "wandb/run-20260101_120000-abc": "or an exported CSV, or wandb://ENTITY/PROJECT/RUN",
    "runs/events.out.tfevents.1": "TensorBoard (NeMo-RL)",
}
OPTION_MEANINGS = {
    "num_generations=8": "group size to assess; default: group size of the run",
    "rollouts=256": "completions per training step: prompts times num_generations",
    "reward=COLUMN": "a reward column, a weighted sum a=1,b=.5, or columns r*",
    "cluster=COLUMN": "prompts with equal values in it count as one prompt",
    "objective=NAME": "loss to assess, e.g. trl_dapo; default: loss of the training run",
    "model=CHECKPOINT": "model that wrote the completions; their gradients are computed",
    "output_root=DIR": "root folder for the study that model= starts; default: outputs",
}


def main() -> None:
    """Run the command; the exit code is 0 if advice is printed and 2 if it is not."""
    parser = VerbParser("advise", __doc__ or "", EXAMPLES, OPTION_MEANINGS)
    parser.add_argument("words", nargs="*", metavar="PATH [NAME=VALUE ...]")
    parser.add_argument("--json", action="store_true", help="verdict and numbers, for programs")
    arguments = parser.parse_args()
    try:
        advice = advice_of(parse_request(arguments.words))
    except ConfigError as error:
        tell(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if arguments.json:
        print(json.dumps(vars(advice), indent=1))
        return
    for line in (advice.sentence, *advice.details):
        tell(*wrapped(line).splitlines())
    tell(f"next: {advice.next}")


if __name__ == "__main__":
    main()
