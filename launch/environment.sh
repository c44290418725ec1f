# Sourced by demo.sh and test.sh: the folder .venv with everything the repository needs, made once and then reused.
#
#   PYTHON=python3.12 bash launch/demo.sh                                    another interpreter than python3
#
# An existing .venv is kept; what it lacks is added (a torch that is already there, say with CUDA, stays). Both
# megatron-core versions go to folders of their own, because a process can import only one: put one on PYTHONPATH.

python=$PWD/.venv/bin/python
megatron_versions="0.16.1 0.19.2"
megatron_folder() { echo "$PWD/.venv/megatron-$1"; }

make_environment() {
    local base=${PYTHON:-python3}
    if ! command -v "$base" >/dev/null; then
        echo "vpcce: '$base' not found. Install Python 3.10 or later, or name one: PYTHON=/path/to/python bash $0" >&2
        return 1
    fi
    if [ ! -x "$python" ]; then
        if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "vpcce: needs Python 3.10 or later, but '$base' is $("$base" -V). Name another: PYTHON=python3.12" >&2
            return 1
        fi
        if ! "$base" -m venv .venv; then
            rm -rf .venv
            echo "vpcce: '$base -m venv' failed. On Debian or Ubuntu: apt-get install python3-venv" >&2
            return 1
        fi
    fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        echo "vpcce: .venv has no pip. Run '$python -m ensurepip', or remove .venv and install python3-pip" >&2
        return 1
    fi

    local wanted installed=.venv/vpcce-installed
    wanted=$(cat pyproject.toml launch/constraints.txt launch/environment.sh | sha256sum)
    [ "$(cat $installed 2>/dev/null)" = "$wanted" ] && return
    echo "vpcce: installing into .venv (about two minutes, 2 GB)"
    # torch first, alone: a later requirement could otherwise choose another build of it.
    "$python" -c 'import torch' 2>/dev/null || "$python" -m pip install -qq torch==2.13.0 || return
    # torch with CUDA brings the Triton that fits it; torch for CPU brings none.
    "$python" -c 'import triton' 2>/dev/null || "$python" -m pip install -qq triton==3.6.0 || return
    "$python" -m pip install -qq -c launch/constraints.txt -e '.[dev,mpi]' || return
    local version
    for version in $megatron_versions; do
        # 0.17 and later declare Python 3.12 but run on 3.11; their declared dependencies are larger than what is used.
        "$python" -m pip install -qq --no-deps --ignore-requires-python --upgrade \
            --target "$(megatron_folder "$version")" "megatron-core==$version" || return
    done
    echo "$wanted" >$installed
}
