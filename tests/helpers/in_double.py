"""Run an entry as `python -m` does, with models that compute in float64 from end to end.

python in_double.py grpo_ustat.train OVERRIDES
"""

import runpy
import sys
from types import SimpleNamespace

from precision import compute_in_double

if __name__ == "__main__":
    compute_in_double(SimpleNamespace(setattr=setattr))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
