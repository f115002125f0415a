# Sourced by run and test. Creates .venv and installs the package with the extra [cli] into it, once
# per change of pyproject.toml or constraints.txt.  Usage: set_up ROOT [another extra]
set_up() {
  local root="$1" extra="${2:-}" venv stamp want
  venv="$root/.venv"
  stamp="$venv/.installed${extra:+-$extra}"
  want="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $root"
  for done in "$stamp" "$venv/.installed-test"; do  # an environment with [test] also has [cli]
    [ -f "$done" ] && [ "$(cat "$done")" = "$want" ] && return
  done
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed, $("$venv/bin/python" --version) was found:" \
         "remove .venv and set PYTHON=/path/to/python3.11" >&2
    exit 2
  }
  echo "Installing into $venv (first time: a few minutes) ..." >&2
  "$venv/bin/python" -m pip install -q --disable-pip-version-check \
    -c "$root/constraints.txt" -e "$root[cli${extra:+,$extra}]" >&2
  echo "$want" > "$stamp"
}
