"""`grpo-ustat convert SRC DST.parquet`: write rollouts of another framework to one Parquet file.

`grpo-ustat mse pool=DST.parquet model=CHECKPOINT` and `grpo-ustat advise` read the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_ustat.cli.parser import VerbParser
from grpo_ustat.config.command_line import command_line, new_rollouts
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.convert import convert
from grpo_ustat.logs.formats import FORMATS, detect
from grpo_ustat.logs.rows import MIN_PROMPTS, Options
from grpo_ustat.terminal.streams import tell

EXAMPLES = {
    "rollouts/ rollouts.parquet": "detect the format from file names and fields",
    "rollouts/ rollouts.parquet --from verl": "set the framework",
    "log.jsonl rollouts.parquet --reward right=1,form=0.5": "weighted sum of rewards",
}


def main() -> None:
    """Run the command; the exit code is 2 if nothing was written."""
    parser = VerbParser("convert", __doc__ or "", EXAMPLES)
    parser.add_argument("source", type=Path, metavar="SRC", help="a file, or a folder of files")
    parser.add_argument("target", type=Path, metavar="DST", help="a Parquet file to write")
    parser.add_argument(
        "--from", dest="name", choices=["auto", *FORMATS], default="auto", metavar="NAME",
        help=f"framework that wrote SRC: {', '.join(FORMATS)}, or auto to detect it (default)",
    )  # fmt: skip
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="G",
        help="completions per prompt; needed if the rows do not name their prompt or group",
    )
    parser.add_argument(
        "--reward", metavar="NAME[=WEIGHT][,...]",
        help="column or key with the rewards, or a weighted sum such as right=1,form=0.5",
    )  # fmt: skip
    parser.add_argument(
        "--version",
        metavar="V",
        help="policy version whose rollouts are converted (default: the last)",
    )
    arguments = parser.parse_args()
    try:
        if not arguments.source.exists():
            raise ConfigError(f"{arguments.source} does not exist")
        is_auto = arguments.name == "auto"
        log_format = detect(arguments.source) if is_auto else FORMATS[arguments.name]
        options = Options(arguments.group_size, arguments.reward, arguments.version)
        conversion = convert(arguments.source, log_format, arguments.target, options)
    except ConfigError as error:
        tell(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    tell(*conversion.lines())
    pairing = conversion.pairing
    if log_format.note and (pairing is None or not conversion.exact):
        tell(f"  note: {log_format.note}")
    model = f"model={'CHECKPOINT' if pairing is None else pairing.checkpoint}"
    cut = [] if conversion.exact else ["study.cut_at=LENGTH"]
    following = command_line("mse", f"pool={arguments.target}", model, *cut)
    if not conversion.is_for_mse:
        following = command_line("advise", str(arguments.target))
    elif conversion.groups < MIN_PROMPTS:
        following = new_rollouts([model])
    tell(f"next: {following}")


if __name__ == "__main__":
    main()
