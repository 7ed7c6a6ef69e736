#!/usr/bin/env bash
# Sets up the virtual environment with the pinned stack; skips what has been done. Needs no root, and compiles nothing.
#
#   bash scripts/setup_env.sh           what training needs
#   bash scripts/setup_env.sh --test    the tools of scripts/test.sh as well
#
# OPENRLHF_DBB_VENV       where the environment is (default: .venv in the repository)
# OPENRLHF_DBB_PLATFORM   cpu or cuda (default: cuda if nvidia-smi lists a GPU)
set -euo pipefail

uv_version=0.13.8
flash_attn=flash-attn==2.8.3  # what openrlhf 0.11.2 pins; its Python part alone

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -m -s "${OPENRLHF_DBB_VENV:-$repo/.venv}")
log=$venv/setup.log
tools=${1:-}

say() { echo "setup: $*"; }
fail() { echo "setup: error: $*" >&2; exit 1; }

# step TITLE COMMAND...: runs the command with its output in the log; shows the log's end if it fails.
step() {
    local title=$1 start=$SECONDS
    shift
    printf '\n== %s: %s\n' "$title" "$*" >>"$log"
    if ! "$@" >>"$log" 2>&1; then
        tail -n 40 "$log" >&2
        fail "$title failed; the whole log is $log; run the script again once the cause is gone"
    fi
    say "$title: $((SECONDS - start)) s"
}

# A GPU machine whose driver is broken must not get the CPU stack without a word.
detect_platform() {
    local listed
    [ -n "$(type -P nvidia-smi)" ] || { echo cpu; return; }
    listed=$(nvidia-smi -L 2>&1) || true
    case $listed in
        "GPU "*) echo cuda ;;
        *) fail "nvidia-smi lists no GPU: ${listed%%$'\n'*}; repair the driver, or set OPENRLHF_DBB_PLATFORM to cpu, or to cuda for an image" ;;
    esac
}

# A pyenv shim can exist without the version behind it, so each candidate has to run.
find_python() {
    local name path version found=()
    for name in python3.11 python3.12 python3.10 python3 python; do
        while read -r path; do
            version=$("$path" -c 'import platform; print(platform.python_version())' 2>/dev/null) || continue
            case $version in
                3.10.* | 3.11.* | 3.12.*)
                    if "$path" -c 'import ensurepip, venv' 2>/dev/null; then
                        echo "$path"
                        return
                    fi
                    version+=" without venv" ;;
            esac
            found+=("$path ($version)")
        done < <(type -aP "$name")
    done
    fail "needs Python 3.10, 3.11 or 3.12 with venv on PATH; found: ${found[*]:-none}; install one of them"
}

# pip_setting KEY: the values pip is configured with, one a line. uv does not read pip's settings.
pip_setting() {
    "$venv/bin/python" -m pip config list | sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" \
        | sed 's/\\n/ /g' | tr ' ' '\n' | sed '/^$/d' | sort -u
}

# Fills `sources`: options that tell uv where packages come from.
find_sources() {
    local link url
    sources=()
    while read -r link; do sources+=(--find-links "$link"); done < <(pip_setting find-links)
    while read -r url; do sources+=(--default-index "$url"); done < <(pip_setting index-url | head -n 1)
    [ "$platform" = cpu ] || return 0
    # The CPU build of torch is not where other packages are: a folder or page given to pip, or torch's own index.
    local links_only=(pip compile --no-index --no-deps --python "$venv/bin/python" "${sources[@]}" -)
    if ! grep '^torch==' "$repo/requirements/cpu.lock" | "$uv" "${links_only[@]}" >>"$log" 2>&1; then
        sources+=(--torch-backend cpu)
    fi
}

# Compiled to bytecode because every worker process would otherwise compile what it imports.
install() { "$uv" pip install --compile-bytecode --python "$venv/bin/python" "${sources[@]}" "$@"; }

# The index has no wheel of flash-attn, and its kernels take hours to compile. Its Python part, which OpenRLHF imports, is
# enough: shims stand in for the kernels. Who has compiled flash-attn installs it over this one, and it is used.
# flash-attn ignores the setting; it keeps this build apart in uv's cache from a compiled one.
install_flash_attn() {
    FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE \
        install --no-deps --no-build-isolation --config-setting cuda=no "$flash_attn"
    [ "$platform" = cuda ] || return 0
    # It brings an older copy of flash-attn 4, which has come over the locked one.
    rm -r "$venv"/lib/python3.*/site-packages/flash_attn/cute
    install --no-deps --reinstall-package flash-attn-4 "$(grep -o '^flash-attn-4==[^ ;]*' "$repo/requirements/cuda.lock")"
}

# What the machine lacks for CUDA, before gigabytes are downloaded.
check_machine() {
    local cuda lacking
    cuda=$(sed -n 's/^nvidia-cuda-runtime==\([0-9]*\.[0-9]*\)\..*/\1/p' "$repo/requirements/cuda.lock")
    if ! lacking=$("$venv/bin/python" -I "$repo/openrlhf_dbb/platform/machine.py" "$cuda" 2>&1); then
        fail "this machine cannot run the stack for CUDA $cuda: ${lacking//$'\n'/; }"
    fi
}

new_environment() { "$python" -m venv "$venv" && "$venv/bin/python" -m pip install "uv==$uv_version"; }

case $tools in
    "" | --test) ;;
    *) fail "unknown argument '$tools'; allowed: --test" ;;
esac
platform=${OPENRLHF_DBB_PLATFORM:-$(detect_platform)} || exit 1
case $platform in
    cpu | cuda) ;;
    *) fail "OPENRLHF_DBB_PLATFORM=$platform is not cpu or cuda" ;;
esac
machine="$(uname -s) on $(uname -m)"
[ "$machine" = "Linux on x86_64" ] || fail "the pinned stack is for Linux on x86_64, this is $machine"

cd "$repo"  # uv reads settings from the working directory
identity="openrlhf-dbb $platform $venv"  # scripts in an environment contain its path, so that a moved one is useless
wanted=$(cat setup.py requirements/*.lock scripts/setup_env.sh | sha256sum)
marker=$venv/openrlhf-dbb.identity
uv=$venv/bin/uv

done_for() { [ "$(cat "$venv/openrlhf-dbb.$1" 2>/dev/null)" = "$wanted" ]; }

# Without the stamp an install was interrupted: uv may take half a package for a whole one.
usable() {
    [ "$(cat "$marker")" = "$identity" ] && [ -f "$venv/openrlhf-dbb.stack" ] \
        && "$uv" --version >/dev/null 2>&1 && "$venv/bin/python" -c '' 2>/dev/null
}

if [ -e "$venv" ] && [ -n "$(ls -A "$venv")" ]; then
    [ -f "$marker" ] || fail "$venv exists and this script did not make it; remove it or set OPENRLHF_DBB_VENV"
    if ! usable; then
        say "$venv is unfinished, moved or for another platform: building it again"
        rm -rf "$venv"
    fi
fi
if done_for stack && { [ -z "$tools" ] || done_for test; }; then exit 0; fi

SECONDS=0
if [ ! -e "$marker" ]; then
    python=$(find_python)
    say "$platform stack for $("$python" -V) ($python) into $venv"
    mkdir -p "$venv"
    echo "$identity" >"$marker"
    step "environment with uv $uv_version" new_environment
fi
[ "$platform" = cpu ] || check_machine
find_sources
if ! done_for stack; then
    rm -f "$venv"/openrlhf-dbb.{stack,test}
    step "pinned packages of $platform.lock" install --no-deps -r "requirements/$platform.lock"
    step "$flash_attn" install_flash_attn
    step "openrlhf-dbb" install --no-deps --no-build-isolation -e .
    echo "$wanted" >"$venv/openrlhf-dbb.stack"
fi
if [ -n "$tools" ]; then
    step "test tools" install --no-deps -r requirements/test.lock
    step "verl for its tests" install --no-deps --target "$venv/verl" -r requirements/verl.lock
    echo "$wanted" >"$venv/openrlhf-dbb.test"
fi
say "done in $SECONDS s"
