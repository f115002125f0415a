"""`grpo-ustat advise SOURCE [num_generations=8]`: keep, raise or lower the group size.

SOURCE is a run folder of `mse` or `train`, a pool folder, a log of rollouts (TRL's
completions_00010.parquet, with model=CHECKPOINT), or a file of rewards (Parquet, CSV, JSON Lines).
"""

from __future__ import annotations

import json
import sys

from grpo_ustat.advise.sources import advice_of, parse_request
from grpo_ustat.cli.parser import VerbParser
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import tell, wrapped

EXAMPLES = {
    "outputs/train/NAME/seed-0": "a run, finished or not",
    "completions_00010.parquet model=CHECKPOINT": "a log written by TRL",
    "rewards.csv num_generations=8": "rewards only",
}
OPTION_MEANINGS = {
    "SOURCE": "run folder of mse or train, pool folder, log of rollouts, or file of rewards",
    "num_generations=8": "group size to assess; default: group size of the run",
    "rollouts=256": "completions per training step: prompts times num_generations",
    "reward=COLUMN": "column of a log that contains the rewards",
    "objective=NAME": "loss to assess, e.g. trl_dapo; default: loss of the training run",
    "model=CHECKPOINT": "model that wrote a log's completions, used to score them (mse pool=FILE)",
    "output_root=DIR": "root folder for the study that model= starts; default: outputs",
}


def main() -> None:
    """Run the command; the exit code is 0 if advice is printed and 2 if it is not."""
    parser = VerbParser("advise", __doc__ or "", EXAMPLES, OPTION_MEANINGS)
    parser.add_argument("words", nargs="*", metavar="SOURCE [NAME=VALUE ...]")
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
