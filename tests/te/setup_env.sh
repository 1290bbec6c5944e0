#!/usr/bin/env bash
# Make .venv-te: what .venv has, plus Transformer Engine, for tests against the real thing on a machine without CUDA.
# Usage: bash tests/te/setup_env.sh WHEELS_DIR [bridge]
#   WHEELS_DIR  a folder with a transformer_engine_torch wheel for .venv's Python and torch (PyPI has the source only)
#   bridge      add Megatron Bridge
# Nothing of .venv is installed a second time or changed: a .pth file puts its packages behind .venv-te's own.
# Run scripts with .venv-te/bin/te-python, which also shows Transformer Engine the CUDA libraries of torch's wheels.
# A second start does nothing while .venv, the wheel and the arguments stay the same.
set -euo pipefail
te_version=2.20.2
bridge_version=0.6.2

fail() {
    echo "error: $*" >&2
    exit 2
}

[ $# -ge 1 ] && [ $# -le 2 ] && [ "${2:-bridge}" = bridge ] || fail "usage: bash $0 WHEELS_DIR [bridge]"
wheels=$(cd "$1" 2>/dev/null && pwd) || fail "WHEELS_DIR '$1' is no folder"
shopt -s nullglob
wheel=("$wheels/transformer_engine_torch-$te_version-"*.whl)
[ ${#wheel[@]} = 1 ] || fail "$wheels must hold one transformer_engine_torch-$te_version-*.whl, it holds ${#wheel[@]}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -f .venv/.installed ] || fail ".venv is missing or half made: run 'bash tools/setup_env.sh dev' first"

stamp="$(sha256sum < tests/te/setup_env.sh | cut -d' ' -f1) $(cat .venv/.installed) $(basename "${wheel[0]}")${2:+ $2}"
# With Bridge there is all that is there without it.
[[ "$(cat .venv-te/.installed 2>/dev/null)" != "$stamp"* ]] || exit 0
echo "making .venv-te: .venv's packages, Transformer Engine $te_version${2:+, Megatron Bridge $bridge_version}"
.venv/bin/python -m venv --clear .venv-te
echo '*' > .venv-te/.gitignore
purelib=$(.venv-te/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cat > "$purelib/venv.pth" <<'PTH'
import os, site, sys; site.addsitedir(os.path.normpath(os.path.join(sys.prefix, os.pardir, ".venv", os.path.relpath(sitedir, sys.prefix))))
PTH
cat > .venv-te/bin/te-python <<'WRAPPER'
#!/usr/bin/env bash
bin=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
libraries=("$bin"/../../.venv/lib/python3.*/site-packages/nvidia/{nccl,cudnn,cu13}/lib)
LD_LIBRARY_PATH=$(IFS=:; echo "${libraries[*]}")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$bin/python" "$@"
WRAPPER
chmod +x .venv-te/bin/te-python

# What .venv has counts as installed: pip fails rather than putting another version before it. One exception: Bridge
# needs a Hydra that refuses newer OmegaConf releases.
.venv/bin/python -m pip freeze --exclude-editable --disable-pip-version-check |
    grep -v "^${2:+omegaconf}==" > .venv-te/constraints.txt
install() {
    .venv-te/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off "$@"
}
# Both packages declare requirements that a machine without CUDA cannot build, or that serve GPUs alone: what they import
# is installed by name, they themselves without requirements, and last, since pip would miss the others aloud.
requirements=(pydantic importlib-metadata nvdlfw-inspect onnx onnxscript)
packages=("${wheel[0]}" "transformer-engine==$te_version" "transformer-engine-cu13==$te_version")
if [ "${2:-}" = bridge ]; then
    requirements+=(
        "transformers>=5.8,<=5.12.1" datasets accelerate "omegaconf>=2.3" "hydra-core>=1.3.4,<1.4" peft rich einops regex
        tensorboard absl-py psutil wandb==0.29.0 diffusers timm open_clip_torch nvidia-modelopt mlflow-skinny qwen-vl-utils
        # what energon imports, which Bridge's training imports
        attrs braceexpand bracex deprecation filetype jmespath jsonschema lark rapidyaml wcmatch webdataset xattr
    )
    packages+=("megatron-bridge==$bridge_version" megatron-energon==7.4.1 multi-storage-client==1.3.1)
fi
install -c .venv-te/constraints.txt "${requirements[@]}"
install --no-deps "${packages[@]}"

# Transformer Engine looks for CUDA's libraries in its own site-packages alone.
mkdir -p "$purelib/nvidia"
ln -sfrt "$purelib/nvidia" .venv/lib/python3.*/site-packages/nvidia/*

.venv-te/bin/te-python - <<'CHECK' || fail "torch in .venv-te must be the 2.13.0 of .venv: make both venvs again"
import sys, sysconfig, torch
home = sysconfig.get_path("purelib").replace("/.venv-te/", "/.venv/")
if not torch.__version__.startswith("2.13.0") or not torch.__file__.startswith(home):
    sys.exit(f"torch {torch.__version__} from {torch.__file__}")
CHECK
.venv-te/bin/te-python -c 'import transformer_engine.pytorch' || fail "Transformer Engine does not import: see above"
echo "$stamp" > .venv-te/.installed
