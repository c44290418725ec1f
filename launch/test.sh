#!/usr/bin/env bash
# All checks and tests that need no GPU. Safe to repeat; makes .venv when there is none.
#
# pytest runs several times, because a process can have Triton's interpreter either on or off, and can import only
# one version of megatron-core. Every test belongs to exactly one of the runs, by its marker (tests/test_package.py
# checks that the markers are there); `gpu` tests are run by hand: .venv/bin/python -m pytest -m gpu
set -uo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
make_environment || exit
newest_triton=3.9.0 # kernels are compiled with it too; they run with the environment's
newest_triton_folder=.venv/triton-$newest_triton
[ -d "$newest_triton_folder/triton" ] ||
    "$python" -m pip install -qq --no-deps --target "$newest_triton_folder" "triton==$newest_triton" || exit

export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
status=0
summaries=()
run() { # name, command: go on after a failure, and remember it
    local name=$1 log code
    log=$(mktemp)
    shift
    printf '\n== %s\n' "$name"
    "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || status=1
    summaries+=("$(printf '%-26s exit %s   %s' "$name" "$code" "$(tail -n 1 "$log")")")
    rm -f "$log"
}
pytest() { "$python" -m pytest -q -rfEs -p no:cacheprovider -n 2 "$@"; }

run "ruff" "$python" -m ruff check --no-cache .
run "tests" pytest -m "not gpu and not interpreter and not megatron"
TRITON_INTERPRET=1 run "interpreter" pytest -m interpreter
PYTHONPATH=$newest_triton_folder run "compiling, Triton $newest_triton" pytest tests/test_aot.py
for version in $megatron_versions; do
    PYTHONPATH=$(megatron_folder "$version") run "megatron-core $version" pytest -m megatron
done

printf '\n'
printf '%s\n' "${summaries[@]}"
exit $status
