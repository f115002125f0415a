"""Console entry `grpo-ustat VERB ...`, also `python -m grpo_ustat VERB ...`."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import NoReturn

from grpo_ustat import __version__
from grpo_ustat.cli.verbs import VERBS, help_text, unknown_verb
from grpo_ustat.config.command_line import install_line

# Verbs that need only the extra [logs], and the modules that this extra installs.
LOG_VERBS, LOG_MODULES = ("advise", "convert"), ("pyarrow", "rich", "yaml")
# Package that provides each module needed by the extra [cli].
EXTRA_PACKAGES = {
    "accelerate": "accelerate",
    "datasets": "datasets",
    "gx2": "gx2",
    "hydra": "hydra-core",
    "jinja2": "jinja2",
    "math_verify": "math-verify",
    "matplotlib": "matplotlib",
    # hydra-core installs omegaconf.
    "omegaconf": "hydra-core",
    "packaging": "packaging",
    "pandas": "datasets",
    "psutil": "psutil",
    "pyarrow": "pyarrow",
    "rich": "rich",
    "safetensors": "safetensors",
    "torch": "torch",
    "transformers": "transformers",
    "yaml": "pyyaml",
}


def main() -> None:
    """Run the verb, which parses the rest of the command line."""
    verb, *arguments = sys.argv[1:] or [""]
    if verb in ("", "-h", "--help", "help"):
        print(help_text(), file=sys.stdout if verb else sys.stderr)
        raise SystemExit(0 if verb else 2)
    if verb == "--version":
        print(f"grpo-ustat {__version__}")
        return
    if verb not in VERBS:
        _refuse(unknown_verb(verb))
    sys.argv[1:] = arguments
    try:
        _call(verb)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        package = EXTRA_PACKAGES.get(module)
        if package is None:
            raise
        extra = "cli"
        if verb in LOG_VERBS:
            # Pickles of tensors, such as slime's, are read with torch.
            extra = "logs" if module in LOG_MODULES else "torch" if module == "torch" else "cli"
        print(f"grpo-ustat {verb} needs {package}: {install_line(extra)}", file=sys.stderr)
        raise SystemExit(2) from None


def _call(verb: str) -> None:
    """Call the verb's entry point, and print an operating-system error on one line."""
    from grpo_ustat.launch.command import without_garbage_collection
    from grpo_ustat.runs.faults import fault_line
    from grpo_ustat.terminal.streams import lasting_output

    try:
        with lasting_output():
            with without_garbage_collection():
                home = VERBS[verb].module or f"grpo_ustat.{verb}.__main__"
                command = importlib.import_module(home)
            command.main()
    except Exception as error:
        line = fault_line(error)
        if line is None:
            raise
        _refuse(line)
    finally:
        # Without this call, the garbage collector would scan all modules and configurations at
        # exit, which takes a tenth of a second.
        if "torch" not in sys.modules:
            gc.freeze()


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
